"""Long convolutions and vector attention of ordered points: SE(3)-Hyena."""

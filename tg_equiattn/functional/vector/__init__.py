"""Vector attention by cross products, and the geometric algebra of space."""

"""Group attention on pixel grids: lifting, self-attention and global attention, transformers."""

"""Attention through waves: pairs, reciprocal lattices, meshes."""

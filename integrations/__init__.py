"""Layers for escnn, PyG and e3nn; each subpackage imports its host and says which extra brings it."""

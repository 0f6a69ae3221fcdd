"""Graphs: batches of nodes, edges, and neighbors."""

from .neighbors import NeighborList, mean_edge_length, neighbor_list

__all__ = ["NeighborList", "mean_edge_length", "neighbor_list"]

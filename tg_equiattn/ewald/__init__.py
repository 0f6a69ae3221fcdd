"""Ewald attention: sums over kernels of the distance, in open and periodic systems, and charges."""

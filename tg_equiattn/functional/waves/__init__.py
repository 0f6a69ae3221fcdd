"""Ewald attention: direct sums, sums over reciprocal vectors, non-uniform fast Fourier transforms."""

"""Modules of attention through waves."""

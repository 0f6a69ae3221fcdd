"""Modules of Ewald attention."""

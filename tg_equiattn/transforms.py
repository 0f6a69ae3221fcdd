from .modes import transformed

__all__ = ["transformed"]

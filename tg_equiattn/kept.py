from .modes import ordinary_tensors

__all__ = ["ordinary_tensors"]

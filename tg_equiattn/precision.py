from .modes import full_precision

__all__ = ["full_precision"]

from .modules import reset_children

__all__ = ["reset_children"]

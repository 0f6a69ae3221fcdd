from .modules import NotScriptable

__all__ = ["NotScriptable"]

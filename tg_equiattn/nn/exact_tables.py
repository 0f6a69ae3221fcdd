from .modules import ExactTables

__all__ = ["ExactTables"]

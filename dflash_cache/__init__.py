"""Stage one: run the frozen target once and keep its hidden states on disk."""

__version__ = "0.1.0"

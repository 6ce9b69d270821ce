"""The vocabulary: frozen values that every room speaks.

Imports nothing of ours and, outside `config` and `log`, only the standard library and msgspec.
"""

__version__ = "0.1.0"

"""Paged attention backends."""

from tiercel.engine.attention.base import Attention, AttentionParams, ForwardState
from tiercel.engine.attention.registry import open_attention

__all__ = ["Attention", "AttentionParams", "ForwardState", "open_attention"]

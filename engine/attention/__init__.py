"""Paged attention backends."""

from engine.attention.base import Attention, AttentionParams, ForwardState
from engine.attention.registry import open_attention

__all__ = ["Attention", "AttentionParams", "ForwardState", "open_attention"]

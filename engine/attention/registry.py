"""Attention backends by name."""

from typing import assert_never

import torch

from engine.attention.base import Attention
from engine.attention.grouped import GroupedAttention
from engine.attention.sdpa import SdpaAttention
from tiercel.settings import AttentionName


def open_attention(name: AttentionName, device: torch.device) -> Attention:
    """The backend that the operator named; `auto` is the fastest on this device that needs no extra package."""
    match name:
        case "sdpa":
            return SdpaAttention()
        case "grouped":
            return GroupedAttention()
        case "auto":
            return GroupedAttention() if device.type == "cpu" else SdpaAttention()
        case _:
            assert_never(name)

"""The table of kernels as ctypes sees it: the fields of `Kernels` in src/kernels.h, in the same order."""

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from enum import IntEnum

import torch

ABI = 9
"""`kAbi` of src/kernels.h."""

TYPE_BY_DTYPE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""`Type` of src/kernels.h, for activations and weights."""

CACHE_TYPE_BY_DTYPE = TYPE_BY_DTYPE | {torch.int8: 3, torch.float8_e4m3fn: 4}
"""`Type` of src/kernels.h, for a cache."""


class CpuClass(IntEnum):
    """Classes of processors that have kernels of their own, in ascending order; `Class` of src/library.cpp."""

    PORTABLE = 0
    AVX2 = 1  # with FMA and F16C
    AVX512 = 2  # with BF16 and VNNI
    AMX = 3  # AVX512, with tile registers for products of bfloat16


class HeadsPlan(ctypes.Structure):
    """The arguments of `store_heads` that are the same in every layer of a forward: `HeadsPlan` of src/kernels.h."""

    _fields_ = (
        *((name, c_int64) for name in ("tokens", "heads", "kv_heads", "head_dim")),
        *((name, c_int64) for name in ("slot_stride", "row_stride", "head_stride")),
        *((name, c_void_p) for name in ("cos", "sin", "slot_ids", "slot_offsets")),
        *((name, c_int) for name in ("type", "kv_type")),
        ("scales", c_int64),
    )


class AttentionStep(ctypes.Structure):
    """The sequences of a step."""

    _fields_ = (
        ("sequences", c_int64),
        ("query_starts", c_void_p),
        ("context_lengths", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_int64),
    )


class AttentionLayer(ctypes.Structure):
    """The shape and the parameters of a layer's attention. Strides count numbers, not bytes."""

    _fields_ = (
        ("query_type", c_int64),
        ("kv_type", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("slot_stride", c_int64),
        ("window", c_int64),
        ("sinks", c_void_p),
        ("scale", c_float),
        ("softcap", c_float),
    )


class QuantizedLayout(ctypes.Structure):
    """The description of a packed weight of 4 or 8 bits: `QuantizedLayout` of src/kernels.h."""

    _fields_ = (
        *((name, c_int64) for name in ("outputs", "inputs", "group")),
        ("order", c_void_p),
        *((name, c_int) for name in ("bits", "is_float8", "scale_type", "has_offsets", "rounds_x")),
        ("x_scale", c_float),
    )


class LinearWeights(ctypes.Structure):
    """A packed weight and its bias: `LinearWeights` of src/layers.h. `quantized`: None for one of 16 bits."""

    _fields_ = (
        *((name, c_void_p) for name in ("packed", "bias")),
        ("quantized", ctypes.POINTER(QuantizedLayout)),
        *((name, c_int64) for name in ("outputs", "inputs")),
        ("type", c_int),
    )


class LayerWeights(ctypes.Structure):
    """The weights of a layer of a decoder: `LayerWeights` of src/layers.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, c_float) for name in ("attention_eps", "mlp_eps", "query_eps", "key_eps")),
        *((name, LinearWeights) for name in ("qkv", "output", "gate_up", "down")),
        ("attention", AttentionLayer),
    )


class LayersRun(ctypes.Structure):
    """The memory of one forward: `LayersRun` of src/layers.h."""

    _fields_ = (
        ("heads", ctypes.POINTER(HeadsPlan)),
        ("step", ctypes.POINTER(AttentionStep)),
        *((name, c_void_p) for name in ("residual", "x", "qkv", "query", "attended", "gate_up", "activated")),
        ("room", c_void_p),
        ("mlp_rows", c_int64),
        ("kv", c_void_p),
        *((name, c_int64) for name in ("layer_bytes", "hidden_size")),
    )


class KernelTable(ctypes.Structure):
    """The kernels of one class. A call releases the GIL, except for `embed`. See src/kernels.h for the arguments."""

    _fields_ = (
        ("linear_bytes", ctypes.CFUNCTYPE(c_int64, c_int64, c_int64)),
        ("linear_pack", ctypes.CFUNCTYPE(None, c_int, c_void_p, c_void_p, c_int64, c_int64)),
        (
            "linear",
            ctypes.CFUNCTYPE(None, c_int, c_int, *(c_void_p,) * 4, c_int64, c_int64, c_int64),
        ),
        # Keeps the GIL: it is short, and a thread that took the GIL would delay the layers, which release it for long.
        ("embed", ctypes.PYFUNCTYPE(c_int, c_int, c_int, *(c_void_p,) * 3, c_int64, c_int64, c_int64)),
        ("quantized_bytes", ctypes.CFUNCTYPE(c_int64, ctypes.POINTER(QuantizedLayout))),
        ("quantized_pack", ctypes.CFUNCTYPE(None, ctypes.POINTER(QuantizedLayout), *(c_void_p,) * 4)),
        ("quantized_room", ctypes.CFUNCTYPE(c_int64, ctypes.POINTER(QuantizedLayout), c_int, c_int64)),
        (
            "quantized_linear",
            ctypes.CFUNCTYPE(None, ctypes.POINTER(QuantizedLayout), c_int, *(c_void_p,) * 4, c_int64, c_void_p),
        ),
        (
            "quantized_embed",
            ctypes.PYFUNCTYPE(c_int, ctypes.POINTER(QuantizedLayout), c_int, *(c_void_p,) * 3, c_int64),
        ),
        (
            "add_norm",
            ctypes.CFUNCTYPE(None, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float),
        ),
        ("silu_mul", ctypes.CFUNCTYPE(None, c_int, c_void_p, c_void_p, c_int64, c_int64)),
        (
            "store_heads",
            ctypes.CFUNCTYPE(
                *(None, ctypes.POINTER(HeadsPlan), c_void_p, c_void_p, c_void_p, c_float, c_float, c_void_p, c_void_p)
            ),
        ),
        (
            "attend",
            ctypes.CFUNCTYPE(
                None,
                ctypes.POINTER(AttentionStep),
                ctypes.POINTER(AttentionLayer),
                c_void_p,
                c_int64,
                c_void_p,
                c_void_p,
            ),
        ),
        (
            "draw_rows",
            ctypes.CFUNCTYPE(*(None, c_int, c_void_p, c_int64, c_int64, c_int64, *(c_void_p,) * 5)),
        ),
    )

"""Choose the types of a model's weights, activations and KV."""

import platform
from dataclasses import dataclass, replace

import torch

from tiercel.engine.models.config import ConfigFields, choose_dtype
from tiercel.engine.models.quantization import Scheme
from tiercel.engine.native.library import NativeLibrary
from tiercel.engine.native.table import CpuClass
from tiercel.settings.settings import CacheDtype, Dtype
from tiercel.values.facts import Facts

_CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class Precision:
    """The types of a model's numbers. Weights and KV are widened to the type of the activations where they are read.

    KV in 8 bits has scales: see `engine.forward.kv_cache`.
    """

    weights: torch.dtype  # of matrices and of the embedding; norms and biases have the type of the activations
    activations: torch.dtype
    kv: torch.dtype
    scheme: Scheme | None = None  # how linear layers are quantised; layers that are not have the type of the weights

    @classmethod
    def of(cls, dtype: torch.dtype) -> "Precision":
        """Return one type for everything."""
        return cls(dtype, dtype, dtype)

    @property
    def facts(self) -> Facts:
        """The types by names of their own, for the fingerprint of a model."""
        return {
            "weights": dtype_name(self.weights),
            "activations": dtype_name(self.activations),
            "kv": dtype_name(self.kv),
            "scheme": None if self.scheme is None else self.scheme.identity,
        }

    def __str__(self) -> str:
        """Return the name of the type, or all three names if they differ."""
        if self.weights is self.activations is self.kv:
            return dtype_name(self.weights)
        weights, activations, kv = map(dtype_name, (self.weights, self.activations, self.kv))
        return f"{weights}, activations {activations}, KV {kv}"


@dataclass(frozen=True, slots=True)
class CpuProducts:
    """The matrix products that are fast on this processor, beside those in float32."""

    widens: bool  # 16-bit weights by float32 activations, in native kernels
    has_bf16: bool  # bfloat16 by bfloat16, in instructions of the processor

    @classmethod
    def of(cls, library: NativeLibrary | None) -> "CpuProducts":
        """Return the products of the native kernels and of torch. `library`: None if there are no native kernels."""
        if library is not None:
            return cls(widens=True, has_bf16=library.cpu_class >= CpuClass.AVX512)
        return cls(widens=False, has_bf16=_torch_has_bf16())


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type as configurations have it, such as float32."""
    return str(dtype).removeprefix("torch.")


def choose_precision(
    asked: Dtype, fields: ConfigFields, products: CpuProducts | None, cache: CacheDtype = "auto"
) -> Precision:
    """Return the types of a model. `products`: None on a GPU, where everything has the type of the checkpoint.

    `cache`: the type of KV; `auto` is that of the weights.
    A CPU computes in float32, unless it has instructions for the type of the checkpoint. Native kernels then read
    weights and KV in 16 bits; without them, `auto` keeps everything in float32, because torch's own products of 16-bit
    types are many times slower there.

    Errors: ConfigError; see `choose_dtype`.
    """
    precision = _choose_wide_precision(choose_dtype(asked, fields), asked, products)
    return precision if cache == "auto" else replace(precision, kv=_CACHE_DTYPES[cache])


def _choose_wide_precision(dtype: torch.dtype, asked: Dtype, products: CpuProducts | None) -> Precision:
    """Return the types of a model whose KV has the type of the weights. `dtype`: that of the checkpoint."""
    if products is None or dtype is torch.float32 or (dtype is torch.bfloat16 and products.has_bf16):
        return Precision.of(dtype)
    if products.widens:
        return Precision(weights=dtype, activations=torch.float32, kv=dtype)
    return Precision.of(torch.float32 if asked == "auto" else dtype)


def precision_warning(
    asked: Dtype, fields: ConfigFields, products: CpuProducts | None, precision: Precision
) -> str | None:
    """Return what the chosen types cost more than those of the checkpoint on a better machine; None if nothing."""
    dtype = choose_dtype(asked, fields)
    if precision.weights is not dtype:
        return (
            f"float32 instead of {dtype_name(dtype)}, so weights and KV take twice the memory: this processor has no "
            "products of that type, and torch computes this model without native kernels"
        )
    is_emulated = dtype is torch.float16 or (products is not None and not products.has_bf16)
    if products is not None and dtype is not torch.float32 and precision.activations is dtype and is_emulated:
        return f"--dtype {asked} is many times slower than float32: this processor has no products of that type"
    return None


def without_kernels(products: CpuProducts | None) -> CpuProducts | None:
    """Return the products of a model that runs in transformers' code, which calls torch's own operators."""
    return None if products is None else replace(products, widens=False)


def _torch_has_bf16() -> bool:
    """Return whether the processor has instructions for products in bfloat16.

    `_is_mkldnn_bf16_supported` is true on x86 processors that only emulate them, too.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()

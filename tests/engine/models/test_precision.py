"""The types of weights, activations and KV for checkpoints and processors."""

from pathlib import Path

import pytest
import torch

from tests.conformance.models import VOCAB_SIZE, Family, make_checkpoint
from tests.engine.models.paged_run import PagedRun
from tests.engine.native.classes import library_of
from tiercel.engine.attention.base import Attention
from tiercel.engine.attention.grouped import GroupedAttention
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.models.config import ConfigFields
from tiercel.engine.models.precision import (
    CpuProducts,
    Precision,
    choose_precision,
    precision_warning,
    without_kernels,
)
from tiercel.engine.models.registry import load_model
from tiercel.engine.native.library import NativeLibrary
from tiercel.engine.native.table import CpuClass
from tiercel.settings.settings import Dtype, EngineSettings
from tiercel.values.facts import canonical

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
AVX2 = CpuProducts(widens=True, has_bf16=False)
AVX512 = CpuProducts(widens=True, has_bf16=True)
TORCH = CpuProducts(widens=False, has_bf16=False)
TORCH_BF16 = CpuProducts(widens=False, has_bf16=True)
CPU = torch.device("cpu")


def fields(dtype: torch.dtype) -> ConfigFields:
    return ConfigFields({"dtype": str(dtype).removeprefix("torch.")}, "config.json")


@pytest.mark.parametrize(
    ("stored", "products", "expected"),
    [
        (F32, AVX2, Precision.of(F32)),
        (F32, None, Precision.of(F32)),
        (BF16, None, Precision.of(BF16)),
        (FP16, None, Precision.of(FP16)),
        (BF16, AVX512, Precision.of(BF16)),
        (BF16, TORCH_BF16, Precision.of(BF16)),
        (BF16, AVX2, Precision(BF16, F32, BF16)),
        (FP16, AVX2, Precision(FP16, F32, FP16)),
        (FP16, AVX512, Precision(FP16, F32, FP16)),
        (BF16, TORCH, Precision.of(F32)),
        (FP16, TORCH, Precision.of(F32)),
        (FP16, TORCH_BF16, Precision.of(F32)),
    ],
)
def test_auto_follows_the_checkpoint_and_the_processor(
    stored: torch.dtype, products: CpuProducts | None, expected: Precision
) -> None:
    assert choose_precision("auto", fields(stored), products) == expected


@pytest.mark.parametrize("products", [None, AVX2, AVX512, TORCH])
def test_float32_on_request_is_float32_everywhere(products: CpuProducts | None) -> None:
    assert choose_precision("float32", fields(BF16), products) == Precision.of(F32)


def test_a_16_bit_type_on_request_is_kept_without_kernels_too() -> None:
    assert choose_precision("bfloat16", fields(F32), TORCH) == Precision.of(BF16)
    assert choose_precision("bfloat16", fields(F32), AVX2) == Precision(BF16, F32, BF16)


@pytest.mark.parametrize(
    ("asked", "stored", "products", "words"),
    [
        ("auto", BF16, TORCH, "float32 instead of bfloat16, so weights and KV take twice the memory"),
        ("auto", FP16, TORCH_BF16, "float32 instead of float16"),
        ("bfloat16", F32, TORCH, "--dtype bfloat16 is many times slower"),
        ("float16", F32, TORCH_BF16, "--dtype float16 is many times slower"),
        ("auto", BF16, AVX2, None),
        ("auto", BF16, AVX512, None),
        ("auto", BF16, TORCH_BF16, None),
        ("auto", F32, TORCH, None),
        ("float32", BF16, TORCH, None),
        ("auto", FP16, None, None),
    ],
)
def test_what_the_types_cost_is_said(
    asked: Dtype, stored: torch.dtype, products: CpuProducts | None, words: str | None
) -> None:
    precision = choose_precision(asked, fields(stored), products)
    warning = precision_warning(asked, fields(stored), products, precision)

    assert (warning is None) == (words is None)
    assert words is None or words in (warning or "")


def test_native_kernels_do_not_count_for_the_code_of_transformers() -> None:
    assert choose_precision("auto", fields(BF16), without_kernels(AVX2)) == Precision.of(F32)
    assert choose_precision("auto", fields(BF16), without_kernels(AVX512)) == Precision.of(BF16)
    assert without_kernels(None) is None


def test_a_precision_is_shown_with_what_differs() -> None:
    assert str(Precision.of(BF16)) == "bfloat16"
    assert str(Precision(BF16, F32, BF16)) == "bfloat16, activations float32, KV bfloat16"


def test_every_choice_of_types_has_its_own_facts() -> None:
    choices = [*map(Precision.of, (F32, BF16, FP16)), Precision(BF16, F32, BF16), Precision(BF16, F32, F32)]
    assert len({canonical(choice.facts) for choice in choices}) == len(choices)


def open_model(folder: Path, library: NativeLibrary | None, attention: Attention, dtype: Dtype = "auto") -> PagedRun:
    model = load_model(EngineSettings(model=str(folder), dtype=dtype), CPU, attention, library=library)
    return PagedRun(model, 1, 64)


@pytest.mark.parametrize("cpu_class", [CpuClass.PORTABLE, CpuClass.AVX2], ids=["portable", "avx2"])
@pytest.mark.parametrize("attention", [SdpaAttention, GroupedAttention])
@pytest.mark.parametrize("stored", [BF16, FP16])
def test_16_bit_weights_are_computed_in_float32(
    stored: torch.dtype, attention: type[SdpaAttention | GroupedAttention], cpu_class: CpuClass, tmp_path: Path
) -> None:
    """Only the rounding of keys and values in the cache separates the logits from those of float32."""
    torch.set_num_threads(1)
    family: Family = "qwen3"
    make_checkpoint(family, tmp_path, seed=5, dtype=stored)
    tokens = torch.randint(3, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1))
    mixed = open_model(tmp_path, library_of(cpu_class), attention())
    exact = open_model(tmp_path, None, SdpaAttention(), "float32")

    got, expected = mixed.prefill(tokens, 7), exact.prefill(tokens, 7)

    assert mixed.kv.dtype is stored
    assert (got - expected).norm() / expected.norm() < (5e-3 if stored is BF16 else 5e-4)

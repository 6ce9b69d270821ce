"""The backend for each name and device."""

import sys

import pytest
import torch
import triton

from tiercel.engine.attention.fa3 import Fa3Attention, has_fa3
from tiercel.engine.attention.grouped import GroupedAttention
from tiercel.engine.attention.native import NativeAttention
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.attention.triton import TritonAttention
from tiercel.engine.native.library import load_library
from tiercel.values.errors import ConfigError

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")


def test_the_cpu_has_backends_in_plain_torch() -> None:
    assert isinstance(open_attention("sdpa", CPU), SdpaAttention)
    assert isinstance(open_attention("grouped", CPU), GroupedAttention)


def test_auto_is_native_on_a_cpu_with_the_library() -> None:
    expected = GroupedAttention if load_library() is None else NativeAttention
    assert isinstance(open_attention("auto", CPU), expected)


def test_native_needs_a_cpu() -> None:
    with pytest.raises(ConfigError, match="--attention-backend native needs a CPU"):
        open_attention("native", CUDA)


@pytest.mark.skipif(has_fa3(), reason="FlashAttention-3 is installed")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_auto_is_triton_on_a_gpu_without_fa3(capability: tuple[int, int]) -> None:
    assert isinstance(open_attention("auto", CUDA, 132, capability), TritonAttention)


def test_triton_runs_on_a_cpu_in_the_interpreter_alone() -> None:
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        assert isinstance(open_attention("triton", CPU), TritonAttention)
        triton.knobs.runtime.interpret = False
        with pytest.raises(ConfigError, match="--attention-backend triton needs a CUDA GPU"):
            open_attention("triton", CPU)


def test_a_gpu_without_triton_falls_back_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)

    assert isinstance(open_attention("auto", CUDA, 132, (9, 0)), SdpaAttention)
    with pytest.raises(ConfigError, match="--attention-backend triton: the package triton is missing"):
        open_attention("triton", CUDA, 132, (9, 0))


@pytest.mark.parametrize(("device", "capability"), [(CPU, None), (CUDA, (8, 9)), (CUDA, (10, 0)), (CUDA, None)])
def test_fa3_needs_a_hopper_gpu(device: torch.device, capability: tuple[int, int] | None) -> None:
    with pytest.raises(ConfigError, match="--attention-backend fa3 needs a Hopper GPU"):
        open_attention("fa3", device, 132, capability)


@pytest.mark.skipif(has_fa3(), reason="FlashAttention-3 is installed")
def test_fa3_needs_its_package() -> None:
    with pytest.raises(ConfigError, match="neither the package flash_attn_3 nor vLLM is installed"):
        open_attention("fa3", CUDA, 132, (9, 0))


@pytest.mark.parametrize("name", ["auto", "sdpa", "grouped", "native", "triton", "fa3"])
def test_on_the_meta_device_every_name_opens(name: str) -> None:
    assert not isinstance(open_attention(name, META), Fa3Attention)  # pyright: ignore[reportArgumentType]

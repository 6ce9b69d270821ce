"""Parts that the last program merges: the same result whichever program is last, launch after launch."""

import random

import pytest
import torch
from torch import Tensor

from tests.engine.attention.scene import KERNEL_DEVICE, Scene
from tests.engine.attention.test_partition import in_interpreter
from tests.engine.attention.test_triton import PARTITIONS, PLAIN, RELATIVE_BY_DTYPE, SINKS, SMALL, nan_like
from tests.engine.kernels.checking import relative_error
from tests.seeds import fast_and_slow
from tiercel.engine.forward.state import AttentionParams
from tiercel.engine.kernels.paged_decode import attend_singles
from tiercel.engine.kernels.paged_partition import Partition, partition_contexts
from tiercel.engine.kernels.paged_store import store_rows
from tiercel.engine.kernels.tiles import DecodeForm, choose_form

FOLDED = DecodeForm(folds_merge=True)
EVERYTHING = AttentionParams(scale=0.3, window=137, softcap=2.0, sinks=SINKS)


def scene_of(name: str, dtype: torch.dtype = torch.float32) -> tuple[Scene, int, Tensor]:
    """Return a step with its cache written, the most shares, and which of its rows are slices of one token."""
    pieces, shares = PARTITIONS[name]
    scene = Scene(pieces, dtype, device=KERNEL_DEVICE)
    store_rows(scene.key, scene.value, scene.kv, scene.state)
    return scene, shares, torch.tensor([length == 1 for _, length in pieces for _ in range(length)])


def attend(scene: Scene, params: AttentionParams, partition: Partition, form: DecodeForm = FOLDED) -> Tensor:
    out = nan_like(scene.query)
    attend_singles(scene.query, scene.kv, scene.state, params, out, partition, form)
    return out.cpu()


@pytest.mark.parametrize("params", [PLAIN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize(
    "name", fast_and_slow(["uneven_2", "one_3", "mixed_6"], ["uneven_22", "one_64", "first_token_8"])
)
@pytest.mark.sampled(1)
def test_the_last_program_writes_what_the_second_kernel_would(name: str, params: AttentionParams) -> None:
    scene, shares, is_single = scene_of(name)
    partition = partition_contexts(scene.state, params.window, shares, SMALL, 2)

    out = attend(scene, params, partition)

    assert torch.equal(out.isnan().any(-1).any(-1), ~is_single)
    assert relative_error(out[is_single], scene.expected(params)[is_single]) < 1e-3
    apart = attend(scene, params, partition, DecodeForm())
    assert relative_error(out[is_single], apart[is_single]) < 1e-6
    assert not partition.ended.any()  # ready for the next launch
    assert torch.equal(attend(scene, params, partition)[is_single], out[is_single])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.sampled(1)
def test_merged_rows_are_rounded_once(dtype: torch.dtype) -> None:
    scene, shares, is_single = scene_of("uneven_22", dtype)

    out = attend(scene, PLAIN, partition_contexts(scene.state, None, shares, SMALL, 2))

    assert relative_error(out[is_single], scene.expected(PLAIN)[is_single]) < RELATIVE_BY_DTYPE[dtype]


@in_interpreter
@pytest.mark.parametrize("seed", fast_and_slow(range(2), range(2, 5)))
@pytest.mark.sampled(1)
@pytest.mark.slow
def test_the_result_does_not_depend_on_the_program_that_ends_last(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter  # lazy: without a GPU only

    scene, shares, is_single = scene_of("uneven_22")
    partition = partition_contexts(scene.state, None, shares, SMALL, 2)
    in_order = attend(scene, PLAIN, partition)
    builder, orders = interpreter.interpreter_builder, random.Random(seed)
    set_dim, set_index = builder.set_grid_dim, builder.set_grid_idx
    programs: list[tuple[int, int, int]] = []

    def shuffle(*sizes: int) -> None:
        x, y, z = sizes
        programs[:] = [(a, b, c) for a in range(x) for b in range(y) for c in range(z)]
        orders.shuffle(programs)
        set_dim(*sizes)

    monkeypatch.setattr(builder, "set_grid_dim", shuffle)
    monkeypatch.setattr(builder, "set_grid_idx", lambda *_: set_index(*programs.pop()))

    shuffled = attend(scene, PLAIN, partition)

    assert not programs
    assert torch.equal(shuffled[is_single], in_order[is_single])


def test_only_a_hopper_or_newer_gpu_starts_kernels_early() -> None:
    form = DecodeForm(folds_merge=True, starts_early=True)

    assert [choose_form(capability, form).starts_early for capability in (None, (8, 9), (9, 0), (10, 0))] == [
        *(False, False, True, True)
    ]
    assert choose_form((8, 0), form).folds_merge

"""FlashAttention-3: the arguments of its operator, and when it is not used. The operator itself needs a GPU."""

import importlib.util
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.engine.attention.fa3.schemas import VLLM_SCHEMA
from tests.engine.attention.scene import Scene, open_triton
from tests.engine.kernels.checking import relative_error
from tiercel.engine.attention.base import PagedReader
from tiercel.engine.attention.fa3 import PACKAGE, Fa3Attention, Fa3Operator, has_fa3, load_fa3, with_neutral
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.attention.triton import TritonAttention
from tiercel.engine.forward.state import AttentionParams
from tiercel.engine.step.mixed_graphs import MixedInputs
from tiercel.values.errors import ConfigError

IS_INSTALLED = has_fa3()
PROCESSORS, HOPPER = 132, (9, 0)
RAGGED = [(40, 1), (0, 33), (17, 1), (8, 5)]
PARAMS = {
    "plain": AttentionParams(scale=0.25),
    "window": AttentionParams(scale=0.25, window=20),
    "window_of_one": AttentionParams(scale=0.25, window=1),
    "softcap": AttentionParams(scale=0.25, softcap=1.5),
}


@cache
def load_fake() -> ModuleType:
    """Load the fake once per process, because it registers an operator."""
    path = Path(__file__).parent / "fa3" / f"{PACKAGE}.py"
    spec = importlib.util.spec_from_file_location(PACKAGE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The fake, importable like the package."""
    if IS_INSTALLED:
        pytest.skip("FlashAttention-3 itself is installed")
    module = load_fake()
    monkeypatch.setitem(sys.modules, PACKAGE, module)
    _forget(module)
    return module


def _forget(module: ModuleType) -> None:
    for noted in (module.given_by_call, module.splits_asked, module.tables_seen):
        noted.clear()


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The fake as the extension of a vLLM that must not be imported."""
    if IS_INSTALLED:
        pytest.skip("FlashAttention-3 itself is installed")
    folder = tmp_path / "vllm" / "vllm_flash_attn"
    folder.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('vLLM was imported')")
    (folder / "_vllm_fa3_C.abi3.so").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    module = load_fake()
    module.loaded = loaded
    _forget(module)
    return module


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_the_operator_gets_its_arguments(fake: ModuleType, params: AttentionParams, dtype: torch.dtype) -> None:
    scene = Scene(RAGGED, dtype)

    out = scene.attend(Fa3Attention(load_fa3(), PROCESSORS), params)

    assert relative_error(out, scene.expected(params)) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_the_operator_of_vllm_gets_its_arguments(vllm: ModuleType, params: AttentionParams, dtype: torch.dtype) -> None:
    """It has no default for any of them."""
    scene, operator = Scene(RAGGED, dtype), load_fa3()

    out = scene.attend(Fa3Attention(operator, PROCESSORS), params)

    assert relative_error(out, scene.expected(params)) < 2e-2
    assert operator.source == "vllm"
    assert [Path(path).name for path in vllm.loaded] == ["_vllm_fa3_C.abi3.so"]
    assert "vllm" not in sys.modules
    (given,) = vllm.given_by_call
    assert (given["cp_world_size"], given["cp_rank"], given["sm_margin"]) == (1, 0, 0)
    assert all(given[name] is None for name in ("s_aux", "k_new", "rotary_cos", "scheduler_metadata", "k_descale"))


def test_the_official_wheel_comes_before_vllm(fake: ModuleType, vllm: ModuleType) -> None:
    assert load_fa3().source == PACKAGE
    assert not vllm.loaded


def test_a_wheel_that_does_not_load_leaves_the_operator_of_vllm(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / f"{PACKAGE}.py").write_text("raise ImportError('undefined symbol')")
    assert load_fa3().source == "vllm"


def test_a_wheel_with_the_extension_as_a_package_is_loaded_without_its_interface(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if IS_INSTALLED:
        pytest.skip("FlashAttention-3 itself is installed")
    load_fake()
    (tmp_path / "flash_attn_3").mkdir()
    (tmp_path / "flash_attn_3" / "__init__.py").write_text("")
    (tmp_path / "flash_attn_3" / "_C.py").write_text("")
    (tmp_path / f"{PACKAGE}.py").write_text("raise ImportError('not needed')")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert load_fa3().source == "flash_attn_3._C"
    finally:
        for name in ("flash_attn_3", "flash_attn_3._C"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("fwd(Tensor q, Tensor k, Tensor v) -> Tensor[]", "has no argument cu_seqlens_q, is_causal, max_seqlen_q"),
        (VLLM_SCHEMA.replace(") ->", ", int speed) ->"), "needs the unknown argument speed"),
    ],
)
def test_an_operator_of_another_time_is_refused_at_the_start(schema: str, said: str) -> None:
    library = torch.library.Library(f"other_fa3_{len(schema)}", "DEF")
    library.define(schema)
    with pytest.raises(ValueError, match=said):
        with_neutral(getattr(torch.ops, f"other_fa3_{len(schema)}").fwd)


def test_an_older_operator_of_vllm_has_fewer_arguments(vllm: ModuleType) -> None:
    at = VLLM_SCHEMA.index(", Tensor? s_aux")
    library = torch.library.Library("older_fa3", "DEF")
    library.define(f"{VLLM_SCHEMA[:at]}) -> Tensor[]")
    names = vllm.NAMES_BY_SCHEMA[VLLM_SCHEMA][:-4]
    library.impl("fwd", partial(vllm._listed, names), "CPU")
    scene = Scene(RAGGED, torch.float16)

    out = scene.attend(
        Fa3Attention(Fa3Operator(with_neutral(torch.ops.older_fa3.fwd), "older"), PROCESSORS), PARAMS["plain"]
    )

    assert relative_error(out, scene.expected(PARAMS["plain"])) < 2e-2


# ---- single tokens


@pytest.mark.parametrize("leaves_decodes", [False, True])
@pytest.mark.parametrize("pieces", [[(40, 1), (3, 1)], RAGGED, [(0, 7)]], ids=["decode", "mixed", "prompt"])
def test_only_steps_of_single_tokens_are_left_to_the_spare(
    fake: ModuleType, pieces: list[tuple[int, int]], leaves_decodes: bool
) -> None:
    scene = Scene(pieces, torch.float16)
    backend = Fa3Attention(load_fa3(), PROCESSORS, spare=open_triton())
    backend.leaves_decodes = leaves_decodes

    out = scene.attend(backend, PARAMS["plain"])

    assert relative_error(out, scene.expected(PARAMS["plain"])) < 2e-2
    is_decode = all(length == 1 for _, length in pieces)
    assert len(fake.given_by_call) == (0 if leaves_decodes and is_decode else 1)


def test_it_reads_rows_of_other_writers_and_can_be_captured(fake: ModuleType) -> None:
    backend = Fa3Attention(load_fa3(), PROCESSORS)

    assert isinstance(backend, PagedReader)
    assert backend.is_capturable


def test_padding_and_bounds_of_a_recording_change_nothing(fake: ModuleType) -> None:
    """A graph of a mixed step has more tokens and rows than the step, and knows bounds of its slices only."""
    backend, scene, params = Fa3Attention(load_fa3(), PROCESSORS), Scene(RAGGED, torch.float16), PARAMS["plain"]
    out = scene.attend(backend, params)
    tokens, size, state = len(scene.query), len(scene.query) + 8, scene.state
    one = torch.zeros(1, dtype=torch.int32)
    recorded = replace(
        MixedInputs.open(size, len(RAGGED), state.block_tables.shape[1], torch.device("cpu")).state(size),
        block_tables=torch.cat((state.block_tables, torch.zeros_like(state.block_tables[:1]))),
        device_query_starts=torch.cat((state.device_query_starts, one + tokens)),
        device_context_lengths=torch.cat((state.device_context_lengths, one)),
    )
    padded = torch.cat((scene.query, torch.full_like(scene.query[:8], torch.nan)))
    assert torch.equal(backend.read(padded, scene.kv, recorded, params)[:tokens], out)
    assert fake.given_by_call[-1]["max_seqlen_q"] == size


def test_the_table_is_converted_once_a_step(fake: ModuleType) -> None:
    """A graph has a state of its own, and so a conversion of its own."""
    backend, scene = Fa3Attention(load_fa3(), PROCESSORS), Scene([(40, 1), (3, 1)], torch.float16)
    layers = [scene.kv, scene.kv.clone(), scene.kv.clone()]

    for state in (scene.state, replace(scene.state)):
        for layer in layers:
            backend.attend(scene.query, scene.key, scene.value, layer, state, PARAMS["plain"])

    first, second = fake.tables_seen[:3], fake.tables_seen[3:]
    assert all(table is first[0] for table in first)
    assert all(table is second[0] for table in second)
    assert first[0] is not second[0]


def test_two_nano_batches_may_take_turns(fake: ModuleType) -> None:
    backend = Fa3Attention(load_fa3(), PROCESSORS)
    scenes = [Scene([(40, 1), (3, 1)], torch.float16), Scene([(0, 25)], torch.float16, seed=1)]
    layers = [(scene, kv) for kv in range(2) for scene in scenes]
    copies = [[scene.kv, scene.kv.clone()] for scene in scenes]

    for scene, layer in layers:
        kv = copies[scenes.index(scene)][layer]
        out = backend.attend(scene.query, scene.key, scene.value, kv, scene.state, PARAMS["plain"])
        assert relative_error(out, scene.expected(PARAMS["plain"])) < 2e-2

    assert len({id(table) for table in fake.tables_seen}) == 2


@pytest.mark.parametrize(
    ("pieces", "splits"),
    [
        ([(900, 1)], 32),  # two key heads: more would be 66
        ([(9, 1)] * 4, 32),
        ([(0, 400)], 6),  # 400 tokens of three heads are ten tiles of queries
        ([(0, 5), (0, 5)], 32),
        ([(0, 5000)], 1),
        ([(2, 1)] * 992, 32),
        ([(2, 1)] * 993, 1),  # more sequences than the operator computes parts for
    ],
)
def test_splits_are_bounded(fake: ModuleType, pieces: list[tuple[int, int]], splits: int) -> None:
    scene = Scene(pieces, torch.float16)

    scene.attend(Fa3Attention(load_fa3(), PROCESSORS), PARAMS["plain"])

    assert fake.splits_asked == [splits]


@pytest.mark.parametrize(
    ("scene", "params", "said"),
    [
        (Scene(RAGGED, torch.float16), AttentionParams(scale=1.0, sinks=torch.ones(6)), "attention sinks"),
        (Scene(RAGGED, torch.float32), PARAMS["plain"], "float32"),
        (Scene(RAGGED, torch.float16, cache=torch.int8), PARAMS["plain"], "cache of 8 bits"),
        (Scene(RAGGED, torch.float16, cache=torch.float8_e4m3fn), PARAMS["plain"], "--kv-cache-dtype"),
        (Scene(RAGGED, torch.float16, head_dim=20), PARAMS["plain"], "heads of 20"),
        (Scene(RAGGED, torch.float16, head_dim=264), PARAMS["plain"], "heads of 264"),
        (Scene(RAGGED, torch.float16, block_size=64), PARAMS["plain"], "--block-size up to 63"),
    ],
    ids=["sinks", "float32", "int8", "fp8", "odd_head", "large_head", "large_block"],
)
@pytest.mark.sampled(3)
def test_unsupported_layers_are_rejected_or_left_to_the_spare(
    fake: ModuleType, scene: Scene, params: AttentionParams, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        scene.attend(Fa3Attention(load_fa3(), PROCESSORS), params)
    assert "--attention-backend fa3" in str(refused.value)

    out = scene.attend(Fa3Attention(load_fa3(), PROCESSORS, spare=open_triton()), params)

    assert relative_error(out, scene.expected(params)) < 1e-3
    assert fake.splits_asked == []


def test_auto_selects_fa3_on_a_hopper_gpu_where_it_is_installed(fake: ModuleType) -> None:
    cuda = torch.device("cuda")

    assert isinstance(open_attention("auto", cuda, PROCESSORS, HOPPER), Fa3Attention)
    assert isinstance(open_attention("fa3", cuda, PROCESSORS, HOPPER), Fa3Attention)
    assert not isinstance(open_attention("auto", cuda, PROCESSORS, (10, 0)), Fa3Attention)


def test_a_package_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / f"{PACKAGE}.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(ConfigError, match="does not load: undefined symbol"):
        open_attention("fa3", torch.device("cuda"), PROCESSORS, HOPPER)
    assert isinstance(open_attention("auto", torch.device("cuda"), PROCESSORS, HOPPER), TritonAttention)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_the_real_operator_computes_attention(params: AttentionParams) -> None:
    if torch.cuda.get_device_capability()[0] != HOPPER[0] or not has_fa3():
        pytest.skip("needs a Hopper GPU and the package flash_attn_3")
    scene = Scene(RAGGED, torch.bfloat16, head_dim=128, device=torch.device("cuda"))

    out = scene.attend(Fa3Attention(load_fa3(), PROCESSORS), params)

    assert relative_error(out.cpu(), scene.expected(params)) < 2e-2

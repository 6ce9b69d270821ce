"""Experts that are partly in memory: the numbers of the model that has them all, and errors."""

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from msgspec.structs import replace
from torch import Tensor

from tests.conformance.bench import EngineBench
from tests.conformance.models import MIXTURES, VOCAB_SIZE, Family, make_checkpoint
from tests.conformance.quantized import compress, compressed_config, write_quantized
from tests.engine.experts.checking_lane import CheckingLane
from tests.engine.models.paged_run import PagedRun
from tests.seeds import fast_and_slow, fresh_seeds
from tiercel.device.volume_file import FileCalls
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.experts.file import ExpertFile
from tiercel.engine.experts.host_store import HostExperts
from tiercel.engine.models.decoder import Decoder
from tiercel.engine.models.registry import build_beside_ssd, load_model
from tiercel.engine.models.tiered_experts import ExpertTier
from tiercel.engine.native.library import NativeLibrary, find_library
from tiercel.settings.settings import EngineSettings
from tiercel.values.errors import ConfigError, DeviceLostError
from tiercel.values.request import SamplingParams

CPU = torch.device("cpu")
SEED = fresh_seeds(1)[0]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load(folder: Path, tmp_path: Path, experts: int | None = None, **settings: object) -> Decoder:
    """Load a model with memory for so many experts of one size; None: for all."""
    library = settings.pop("library", None)
    assert library is None or isinstance(library, NativeLibrary)
    chosen: dict[str, object] = {"model": str(folder), "dtype": "float32", "cache_folder": str(tmp_path / "cache")}
    chosen |= settings
    attention = SdpaAttention() if library is None else open_attention("native", CPU)

    def open_model(memory: int | None) -> Decoder:
        model = load_model(EngineSettings(**chosen, expert_memory_bytes=memory), CPU, attention, library=library)  # type: ignore[arg-type]
        assert isinstance(model, Decoder)
        return model

    if experts is None:
        return open_model(None)
    whole = open_model(1 << 30)
    assert whole.tier is not None
    gauges = whole.tier.gauges()
    assert gauges.slots == gauges.experts
    whole.tier.close()
    return open_model(experts * gauges.memory_bytes // gauges.slots)


def close(model: Decoder) -> None:
    assert model.tier is not None
    model.tier.close()


def steps(model: Decoder, seed: int) -> list[Tensor]:
    """Return the logits of a prompt in slices, then of tokens one by one, of two sequences."""
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randint(3, VOCAB_SIZE, (30,), generator=generator) for _ in range(2))
    run = PagedRun(model, 2, 40)
    found = run.step([(0, 0, first[:17])]) + run.step([(0, 17, first[17:29]), (1, 0, second[:9])])
    for at in range(5):
        found += run.step([(0, 29 + at, first[at : at + 1]), (1, 9 + at, second[9 + at : 10 + at])])
    return found


@pytest.mark.parametrize("experts", [3, 7])
@pytest.mark.parametrize("family", MIXTURES)
def test_logits_are_those_of_the_model_with_all_experts_in_memory(family: Family, experts: int, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, seed=SEED)
    expected = steps(load(tmp_path, tmp_path), SEED)
    model = load(tmp_path, tmp_path, experts)
    assert all(map(torch.equal, steps(model, SEED), expected)), SEED
    assert model.tier is not None
    gauges = model.tier.gauges()
    assert gauges.slots == experts < gauges.experts
    assert gauges.misses and gauges.evictions and gauges.fetched_bytes
    close(model)


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("bfloat16", "auto"), ("bfloat16", "int8"), ("bfloat16", "int4"), ("float32", "int4")]
)
@pytest.mark.parametrize("family", fast_and_slow(["qwen3_moe"], ["mixtral", "olmoe"]))
def test_packed_experts_give_the_same(family: Family, dtype: str, quantization: str, tmp_path: Path) -> None:
    library = find_library()
    if isinstance(library, str):
        pytest.skip(library)
    make_checkpoint(family, tmp_path, seed=SEED)
    more: dict[str, object] = {"dtype": dtype, "quantization": quantization, "library": library}
    expected = steps(load(tmp_path, tmp_path, **more), SEED)
    model = load(tmp_path, tmp_path, 4, **more)
    assert all(map(torch.equal, steps(model, SEED), expected)), SEED
    close(model)


def test_quantised_checkpoints_give_the_same(tmp_path: Path) -> None:
    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=16)
    write = compress(args, "pack-quantized")
    config = compressed_config(args, "pack-quantized") | {"ignore": ["lm_head", "re:.*\\.gate$"]}
    write_quantized(tmp_path, write, config, "qwen3_moe", SEED)
    expected = steps(load(tmp_path, tmp_path), SEED)
    model = load(tmp_path, tmp_path, 4)
    assert all(map(torch.equal, steps(model, SEED), expected)), SEED
    close(model)


def test_the_fingerprint_does_not_depend_on_the_memory(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path, seed=SEED)
    whole, model = load(tmp_path, tmp_path), load(tmp_path, tmp_path, 5)
    assert model.fingerprint == whole.fingerprint
    assert model.weights_bytes < whole.weights_bytes
    close(model)


def test_dummy_weights_are_those_of_the_whole_model(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path, seed=SEED)
    expected = steps(load(tmp_path, tmp_path, load_format="dummy"), SEED)
    model = load(tmp_path, tmp_path, 5, load_format="dummy")
    assert all(map(torch.equal, steps(model, SEED), expected)), SEED
    close(model)


def test_an_expert_that_cannot_be_read_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("mixtral", tmp_path, seed=SEED)
    model = load(tmp_path, tmp_path, 3)
    steps(model, SEED)
    monkeypatch.setattr(FileCalls, "preadv", lambda *_: 0)
    with pytest.raises(DeviceLostError, match="an expert cannot be read from the SSD folder"):
        for seed in range(20):
            steps(model, seed)
    close(model)


def test_memory_for_less_than_one_token_is_refused(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    with pytest.raises(ConfigError, match=r"--expert-memory .* is too small: the 3 experts of one token"):
        load(tmp_path, tmp_path, 2)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    with pytest.raises(ConfigError, match="--expert-memory: LlamaForCausalLM has no mixture of experts"):
        load(tmp_path, tmp_path, 1)


def test_the_engine_answers_with_the_tokens_of_the_model_with_all_experts_in_memory(tmp_path: Path) -> None:
    """Several sequences at once, preempted for want of KV, and prompts in slices."""
    make_checkpoint("olmoe", tmp_path, seed=SEED)

    def answers(**settings: object) -> list[list[int]]:
        bench = EngineBench(tmp_path, kv_cache_memory_bytes=200_000, max_num_batched_tokens=24, **settings)
        try:
            generator = torch.Generator().manual_seed(SEED)
            prompts = [torch.randint(3, VOCAB_SIZE, (5 + 19 * i,), generator=generator).tolist() for i in range(5)]
            seqs = [bench.submit(prompt, GREEDY) for prompt in prompts]
            bench.run()
            return [bench.inbox.tokens[seq] for seq in seqs]
        finally:
            bench.close()

    expected = answers()
    assert answers(expert_memory_bytes=64 << 10, cache_folder=str(tmp_path / "cache")) == expected, SEED


@pytest.mark.parametrize("quantization", ["auto", "int4"])
def test_experts_in_host_memory_give_the_same(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beside a GPU, here with slots on the CPU."""
    make_checkpoint("qwen3_moe", tmp_path, seed=SEED)
    expected = steps(load(tmp_path, tmp_path, quantization=quantization), SEED)
    monkeypatch.setattr(ExpertFile, "create", lambda *_: HostExperts(CPU, CheckingLane()))
    model = load(tmp_path, tmp_path, 4, quantization=quantization)
    assert all(map(torch.equal, steps(model, SEED), expected)), SEED
    assert model.tier is not None and model.tier.gauges().evictions
    close(model)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_experts_beside_a_gpu_give_the_same(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path, seed=SEED)
    device = torch.device("cuda")

    def open_model(memory: int | None) -> Decoder:
        settings = EngineSettings(model=str(tmp_path), dtype="float32", expert_memory_bytes=memory)
        model = load_model(settings, device, SdpaAttention())
        assert isinstance(model, Decoder)
        return model

    tokens = torch.arange(3, 33, device=device)
    expected = PagedRun(open_model(None), 1, 32).prefill(tokens, 13)
    whole = open_model(1 << 30)
    assert whole.tier is not None
    gauges = whole.tier.gauges()
    model = open_model(4 * gauges.memory_bytes // gauges.slots)
    assert torch.equal(PagedRun(model, 1, 32).prefill(tokens, 13), expected)
    close(model)


def test_a_folder_that_cannot_be_used_ends_no_engine_for_which_streams_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first folder fails, then the next one is taken; if all fail, all experts are in memory."""
    make_checkpoint(MIXTURES[0], tmp_path, seed=SEED)
    expected = steps(load(tmp_path, tmp_path), 5)
    bad = tmp_path / "file"
    bad.write_text("no folder")
    disk: dict[str, object] = {"kv_disk_paths": (str(bad),), "expert_memory_bytes": 1 << 30}

    def open_model(**more: object) -> Decoder:
        settings = {"model": str(tmp_path), "dtype": "float32", "cache_folder": str(tmp_path / "cache")} | disk | more
        model = load_model(EngineSettings(**settings), CPU, SdpaAttention())  # type: ignore[arg-type]
        assert isinstance(model, Decoder)
        return model

    with pytest.raises(ConfigError, match=str(bad)):
        open_model()
    elsewhere = open_model(kv_disk_optional=True)
    assert elsewhere.tier is not None and not elsewhere.lacks_expert_tier
    assert f"folder={bad} error=EEXIST" in caplog.text
    close(elsewhere)
    in_memory = open_model(kv_disk_optional=True, cache_folder=str(bad))
    assert in_memory.tier is None and in_memory.lacks_expert_tier
    assert all(torch.equal(one, other) for one, other in zip(steps(in_memory, 5), expected, strict=True))


def test_a_disk_that_fills_while_experts_are_written_is_passed_over(tmp_path: Path) -> None:
    """What was written is closed, and the model is built again elsewhere."""
    room = [3]

    def pwritev(fd: int, parts: Sequence[memoryview], at: int) -> int:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwritev(fd, parts, at)

    tiers: list[ExpertTier | None] = []

    def build(tier: ExpertTier | None) -> Decoder:
        tiers.append(tier)
        if tier is not None:
            for _ in range(5):
                tier.write([torch.zeros(100)])
        return cast(Decoder, SimpleNamespace())

    settings = EngineSettings(model="unused", kv_disk_paths=(str(tmp_path),), cache_folder=None)
    calls = FileCalls(pwritev=pwritev)
    with pytest.raises(ConfigError, match="No space left"):
        build_beside_ssd(settings, 1 << 20, build, calls)
    room[0] = 3
    model = build_beside_ssd(replace(settings, kv_disk_optional=True), 1 << 20, build, calls)
    assert model.lacks_expert_tier and tiers[-1] is None


class HangingDisk:
    """A disk of which the n-th call of a kind never returns, until the test ends."""

    def __init__(self, kind: str, nth: int) -> None:
        self.end = threading.Event()
        self._left = {"pwritev": -1, "preadv": -1} | {kind: nth}

    @property
    def calls(self) -> FileCalls:
        return FileCalls(preadv=self._preadv, pwritev=self._pwritev)

    def _preadv(self, fd: int, parts: Sequence[memoryview], at: int) -> int:
        self._pass("preadv")
        return os.preadv(fd, parts, at)

    def _pwritev(self, fd: int, parts: Sequence[memoryview], at: int) -> int:
        self._pass("pwritev")
        return os.pwritev(fd, parts, at)

    def _pass(self, kind: str) -> None:
        self._left[kind] -= 1
        if self._left[kind] == 0:
            assert self.end.wait(60)


@pytest.mark.parametrize(("kind", "nth"), [("preadv", 1), ("pwritev", 1), ("pwritev", 3), ("preadv", 2), ("preadv", 5)])
def test_a_disk_that_hangs_while_experts_are_written_is_passed_over(kind: str, nth: int, tmp_path: Path) -> None:
    """In the first folder some call of the start hangs: while the file is made, written, or read back."""
    first, second = tmp_path / "first", tmp_path / "second"
    disk = HangingDisk(kind, nth)
    tiers: list[ExpertTier | None] = []

    def build(tier: ExpertTier | None) -> Decoder:
        tiers.append(tier)
        assert tier is not None
        for _ in range(5):
            tier.write([torch.zeros(100)])
        return cast(Decoder, SimpleNamespace(lacks_expert_tier=False))

    settings = EngineSettings(
        model="unused", kv_disk_paths=(str(first),), cache_folder=str(second), kv_disk_optional=True
    )
    model = build_beside_ssd(settings, 1 << 20, build, disk.calls, limit_s=0.5)
    assert not model.lacks_expert_tier
    assert len(tiers) == (1 if (kind, nth) == ("preadv", 1) else 2)  # the first call is the one of the opening
    disk.end.set()
    used = tiers[-1]
    assert used is not None
    used.close()


def test_at_a_restart_every_expert_is_read_back(tmp_path: Path) -> None:
    """A disk with one bad place would end one engine after the other: each writes the experts there again."""

    def preadv(fd: int, parts: Sequence[memoryview], at: int) -> int:
        if at == 3 * 4096:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(fd, parts, at)

    def build(tier: ExpertTier | None) -> Decoder:
        for _ in range(5 if tier is not None else 0):
            assert tier is not None
            tier.write([torch.zeros(100)])
        return cast(Decoder, SimpleNamespace())

    settings = EngineSettings(model="unused", kv_disk_paths=(str(tmp_path),), cache_folder=None, kv_disk_optional=True)
    model = build_beside_ssd(settings, 1 << 20, build, FileCalls(preadv=preadv))
    assert model.lacks_expert_tier


def test_a_disk_that_takes_experts_and_returns_none_is_passed_over(tmp_path: Path) -> None:
    """Each engine would write the experts again and end with the first one that it reads."""

    def preadv(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    tiers: list[ExpertTier | None] = []

    def build(tier: ExpertTier | None) -> Decoder:
        tiers.append(tier)
        if tier is not None:
            for _ in range(5):
                tier.write([torch.zeros(100)])
        return cast(Decoder, SimpleNamespace())

    settings = EngineSettings(model="unused", kv_disk_paths=(str(tmp_path),), cache_folder=None)
    calls = FileCalls(preadv=preadv)
    with pytest.raises(ConfigError, match=f"cannot read the experts from {tmp_path}: Input/output error"):
        build_beside_ssd(settings, 1 << 20, build, calls)
    model = build_beside_ssd(replace(settings, kv_disk_optional=True), 1 << 20, build, calls)
    assert model.lacks_expert_tier and tiers[-1] is None

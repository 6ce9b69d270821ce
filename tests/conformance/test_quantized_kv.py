"""The whole engine with KV in 8 bits.

The stored bytes of a token depend on its own key and value only, and the native kernels compute every row independently
of the others. So tokens and log-probabilities are the same, bit for bit, however a sequence was scheduled and whichever
tier its blocks came from.
"""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conformance.bench import EngineBench
from tests.conformance.models import VOCAB_SIZE, Family, make_checkpoint
from tests.conformance.test_tiers_exactness import hit_tokens, route_bytes
from tiercel.engine.native.library import load_library
from tiercel.settings.settings import CacheDtype
from tiercel.values.request import SamplingParams
from tiercel.values.tier import Route, Tier

CACHES: tuple[CacheDtype, ...] = ("int8", "fp8")
OUTPUTS = 40  # tokens
BLOCK = 16
SMALL = 26  # blocks of a device pool that is too small for all prompts at once
SIZE = 4 << 20  # bytes of DDR and of SSD
APART = {"cpu_device_pool": True, "kv_host_bytes": SIZE}
# Largest mean and largest single difference of a log-probability of a prompt from that over KV in float32: about twice
# what was measured over random models of three families (see `test_prompts_are_read_as_over_the_full_cache`).
BOUNDS = {"int8": (0.03, 0.15), "fp8": (0.13, 0.6)}

needs_library = pytest.mark.skipif(load_library() is None, reason="the native library is not compiled")


def draw_prompts() -> list[list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(2, 90))] for _ in range(6)]
    prompts += [shared + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 20))] for _ in range(2)]
    return [*prompts, [rng.randrange(3, VOCAB_SIZE) for _ in range(300)]]


PROMPTS = draw_prompts()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("llama3")
    make_checkpoint("llama3", path, seed=11, std=0.15, dtype=torch.bfloat16)
    return path


def bench(folder: Path, cache: CacheDtype, settings: dict[str, object], arena_fd: int | None = None) -> EngineBench:
    given = {"max_num_seqs": 10, "dtype": "bfloat16", "kv_cache_dtype": cache, "max_model_len": 400, **settings}
    return EngineBench(folder, arena_fd, **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[CacheDtype, list[list[int]]]:
    """Return the tokens of every prompt, computed alone and whole."""
    found: dict[CacheDtype, list[list[int]]] = {}
    for cache in (*CACHES, "auto"):
        one = bench(folder, cache, {"enable_prefix_caching": False, "max_num_batched_tokens": 512})
        found[cache] = [one.greedy([prompt], OUTPUTS)[0] for prompt in PROMPTS]
        one.close()
    return found


@pytest.fixture
def arena_fd() -> Iterator[int]:
    fd = os.memfd_create("test-arena")
    yield fd
    os.close(fd)


@needs_library
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 512},
        {"long_prefill_token_threshold": 7},
        {"long_prefill_token_threshold": 16, "async_scheduling": False},
        {"num_gpu_blocks_override": SMALL, "preemption_mode": "recompute"},
        {"num_gpu_blocks_override": SMALL, "preemption_mode": "swap", **APART},
    ],
    ids=["together", "chunked", "chunked by blocks", "recomputed", "swapped"],
)
@pytest.mark.sampled(2)
def test_tokens_are_those_of_each_sequence_alone(
    folder: Path, alone: dict[CacheDtype, list[list[int]]], cache: CacheDtype, settings: dict[str, object]
) -> None:
    engine = bench(folder, cache, settings)

    for _ in range(2):  # the second time with cached prefixes
        assert engine.greedy(PROMPTS, OUTPUTS) == alone[cache]

    assert engine.gauges.prefix_hits > 0
    if "preemption_mode" in settings:
        assert engine.gauges.preemptions > 0
    if settings.get("preemption_mode") == "swap":
        assert engine.gauges.preemptions_swap > 0
        assert route_bytes(engine, Route.RESTORE) > 0
    engine.close()


@needs_library
@pytest.mark.parametrize("cache", CACHES)
def test_tokens_are_the_same_after_a_restart_with_blocks_from_the_disk(
    folder: Path, alone: dict[CacheDtype, list[list[int]]], cache: CacheDtype, tmp_path: Path
) -> None:
    settings = disk_settings(tmp_path)
    first = bench(folder, cache, settings)
    assert first.greedy(PROMPTS, OUTPUTS) == alone[cache]
    assert route_bytes(first, Route.PERSIST) > 0
    first.close()

    again = bench(folder, cache, settings)
    again.settle()
    assert again.greedy(PROMPTS, OUTPUTS) == alone[cache]
    assert hit_tokens(again, Tier.SSD) >= (len(PROMPTS[-1]) - 1) // BLOCK * BLOCK
    again.close()


def disk_settings(tmp_path: Path) -> dict[str, object]:
    return {
        "kv_disk_paths": (str(tmp_path / "kv"),),
        "kv_disk_bytes": SIZE,
        "preemption_mode": "swap",
        "num_gpu_blocks_override": 200,
        **APART,
    }


@needs_library
@pytest.mark.parametrize("cache", CACHES)
def test_a_new_engine_finds_its_blocks_in_shared_memory(
    folder: Path, alone: dict[CacheDtype, list[list[int]]], cache: CacheDtype, arena_fd: int
) -> None:
    settings: dict[str, object] = {"preemption_mode": "swap", "num_gpu_blocks_override": 200}
    first = bench(folder, cache, settings, arena_fd)
    assert first.greedy(PROMPTS, OUTPUTS) == alone[cache]
    # The first engine is not closed, as after a crash.
    again = bench(folder, cache, settings, arena_fd)
    again.settle()
    assert again.greedy(PROMPTS, OUTPUTS) == alone[cache]
    assert again.gauges.prefix_hits > 0
    again.close()
    first.close()


@needs_library
@pytest.mark.parametrize(("earlier", "later"), [("auto", "int8"), ("int8", "auto"), ("int8", "fp8")])
@pytest.mark.sampled(1)
def test_blocks_of_another_type_are_never_found(
    folder: Path,
    alone: dict[CacheDtype, list[list[int]]],
    earlier: CacheDtype,
    later: CacheDtype,
    tmp_path: Path,
    arena_fd: int,
) -> None:
    """Neither on the disk nor in the memory that an earlier engine left; the control is the two tests above."""
    settings = disk_settings(tmp_path)
    first = bench(folder, earlier, settings, arena_fd)
    assert first.greedy(PROMPTS, OUTPUTS) == alone[earlier]
    assert route_bytes(first, Route.PERSIST) > 0
    fingerprint = first.engine.model.fingerprint
    first.close()

    other = bench(folder, later, settings, arena_fd)
    other.settle()
    assert other.engine.model.fingerprint != fingerprint
    assert [other.greedy([prompt], OUTPUTS)[0] for prompt in PROMPTS[:6]] == alone[later][:6]
    assert other.gauges.prefix_hits == 0
    assert (hit_tokens(other, Tier.SSD), hit_tokens(other, Tier.DDR)) == (0, 0)
    other.close()


def read_prompts(engine: EngineBench, prompts: list[list[int]]) -> torch.Tensor:
    """Return the log-probabilities of all tokens of the prompts but their first ones."""
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    seqs = [engine.submit(prompt, asked) for prompt in prompts]
    engine.run()
    parts = [part.logprobs for seq in seqs for part in engine.inbox.prompts[seq]]
    return torch.cat([torch.frombuffer(bytearray(part), dtype=torch.float32) for part in parts if len(part)])


@pytest.mark.parametrize("family", ["llama3", "qwen3", "gemma3"])
@pytest.mark.sampled(1)
def test_prompts_are_read_as_over_the_full_cache(family: Family, tmp_path: Path) -> None:
    """With float32 elsewhere, so that all of the difference is that of KV. gemma3 runs in transformers' code."""
    make_checkpoint(family, tmp_path, seed=3, std=0.15)
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 20]
    found: dict[str, torch.Tensor] = {}
    for cache in ("auto", *CACHES):
        engine = bench(tmp_path, cache, {"dtype": "float32", "long_prefill_token_threshold": 64})
        found[cache] = read_prompts(engine, prompts)
        engine.close()
    for cache in CACHES:
        difference = (found[cache] - found["auto"]).abs()
        mean, most = difference.mean().item(), difference.max().item()
        shift = (found["auto"] - found[cache]).mean().item()
        print(f"{family} {cache} tokens={len(difference)} mean={mean:.4f} largest={most:.4f} loss={shift:+.5f}")
        assert 0 < mean < BOUNDS[cache][0]
        assert most < BOUNDS[cache][1]

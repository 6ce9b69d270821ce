"""Steps of many nano-batches give the same tokens as whole steps, on the simulated machine and on a real model."""

import random
from pathlib import Path

import pytest
import torch

from tests.conformance.models import VOCAB_SIZE, make_checkpoint
from tests.engine.test_loop import VOCAB, Bench, Client, walk
from tiercel.device.cpu import CpuDevice
from tiercel.device.sim import SimMachine
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.loop import EngineLoop
from tiercel.engine.models.registry import load_model
from tiercel.engine.sampling import Sampler
from tiercel.engine.step.rows import RowBook
from tiercel.engine.step.runner import Runner
from tiercel.kvcache.manager import CacheManager
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.draft import StepSplitter
from tiercel.scheduler.nanobatch import candidate_splits, cut, shape_of
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.policy import open_policy
from tiercel.scheduler.step_limits import StepLimits
from tiercel.settings.settings import AttentionName, EngineSettings
from tiercel.values.clock import MonotonicClock
from tiercel.values.ids import SeqId
from tiercel.values.plan import NanoBatch, Slice
from tiercel.values.request import Request, SamplingParams, pack_tokens
from tiercel.wire.frames import Abort, Submit


class RandomSplitter:
    """Cuts every step at random, sometimes into one nano-batch per token."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self.most = 0

    def split(self, slices: tuple[Slice, ...], block_size: int) -> tuple[NanoBatch, ...]:
        if self._rng.random() < 0.3:
            batches = _single_tokens(slices)
        else:
            splits = candidate_splits(shape_of(slices))
            batches = cut(slices, self._rng.choice(splits[1:] or splits), block_size)
        self.most = max(self.most, len(batches))
        return batches


def _single_tokens(slices: tuple[Slice, ...]) -> tuple[NanoBatch, ...]:
    parts = [
        part
        for piece in slices
        for part in (
            (piece,)
            if piece.is_decode
            else (
                Slice(piece.seq, position, 1, piece.samples and position == piece.start + piece.length - 1)
                for position in range(piece.start, piece.start + piece.length)
            )
        )
    ]
    return tuple(NanoBatch((part,)) for part in parts)


class SplitBench(Bench):
    """The simulated loop with steps of many nano-batches."""

    def __init__(self, seed: int, *, blocks: int, depth: int, seqs: int, tokens: int) -> None:
        super().__init__(blocks=blocks, depth=depth, seqs=seqs, tokens=tokens)
        self.splitter = RandomSplitter(seed)
        planner = Planner(self.book, StepLimits(seqs, tokens), splitter=self.splitter)
        self.machine = SimMachine(self.book, 4, VOCAB, self.clock, max_rows=seqs + 1)
        self.loop = EngineLoop(self.book, self.cache, planner, self.machine, self.client, self.clock, depth)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", range(15))
@pytest.mark.sampled(20)
def test_random_work_in_nano_batches_gives_the_right_tokens(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    bench = SplitBench(
        seed, blocks=rng.choice([24, 30, 60]), depth=depth, seqs=rng.choice([1, 3, 8]), tokens=rng.choice([8, 64])
    )
    walk(bench, seed, rng, refusals=0.05)
    assert bench.splitter.most > 1


# ---- a real model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("llama3")
    make_checkpoint("llama3", path, seed=11, std=0.15)
    return path


def say(
    folder: Path, splitter: StepSplitter | None, depth: int, attention: AttentionName, temperature: float
) -> list[list[int]]:
    """Return the answers to twelve concurrent prompts, three of which are aborted."""
    rng = random.Random(5)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
    prompts = [shared[: 20 * (n % 3)] + [rng.randrange(3, VOCAB_SIZE) for _ in range(5 + 17 * n)] for n in range(12)]
    settings = EngineSettings(model=str(folder), threads=1, dtype="float32", attention_backend=attention)
    cpu = torch.device("cpu")
    model = load_model(settings, cpu, open_attention(settings.attention_backend, cpu))
    kv = torch.zeros(61, model.layers, 16, model.kv_heads, 2 * model.head_dim)
    book = SequenceBook(open_policy("fcfs"), 400, ())
    rows = RowBook(13, 25)
    client, clock, lane = Client(), MonotonicClock(), CpuDevice(1).open_lane()
    runner = Runner(model, kv, Sampler(13, model.vocab_size, cpu), lane, rows, book, ())
    planner = Planner(book, StepLimits(12, 96), splitter=splitter)
    loop = EngineLoop(book, CacheManager(60, 16, b"split"), planner, runner, client, clock, depth)
    params = SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True, seed=3)
    requests = [
        Request(id=SeqId(number), prompt=pack_tokens(prompt), params=params, arrival_s=float(number))
        for number, prompt in enumerate(prompts)
    ]
    loop.take([Submit(request) for request in requests])
    steps = 0
    while not loop.is_idle:
        loop.step()
        loop.check_integrity()
        steps += 1
        if steps in (3, 6, 9):
            loop.take([Abort((SeqId(steps),))])
    lane.close()
    assert set(client.endings.values()) == {1}
    return [client.tokens.get(number, []) for number in range(12) if number not in (3, 6, 9)]


@pytest.mark.parametrize(
    ("depth", "attention", "temperature"), [(0, "sdpa", 0.0), (1, "grouped", 0.0), (1, "sdpa", 0.8)]
)
@pytest.mark.sampled(1)
def test_a_real_model_generates_the_same_in_nano_batches(
    folder: Path, depth: int, attention: AttentionName, temperature: float
) -> None:
    splitter = RandomSplitter()
    split = say(folder, splitter, depth, attention, temperature)
    assert split == say(folder, None, depth, attention, temperature)
    assert splitter.most >= 8
    assert all(len(tokens) == 12 for tokens in split)

"""The runner and the loop with a model that allocates more memory than exists, on torch."""

import weakref

import pytest
import torch
from torch import Tensor

from tests.engine.step.test_runner import BLOCK, VOCAB, Bench, FullLane, NextNumber
from tests.engine.test_loop import Client
from tiercel.device.cpu import CpuDevice, InlineLane
from tiercel.engine.forward.state import ForwardState
from tiercel.engine.loop import EngineLoop
from tiercel.engine.sampling import Sampler
from tiercel.engine.step.rows import RowBook
from tiercel.engine.step.runner import Runner
from tiercel.kvcache.manager import CacheManager
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.policy import open_policy
from tiercel.scheduler.step_limits import StepLimits
from tiercel.values.clock import MonotonicClock
from tiercel.values.errors import DeviceLostError, OutOfDeviceMemoryError
from tiercel.values.ids import SeqId
from tiercel.values.outcome import FinishReason
from tiercel.values.request import Request, SamplingParams, pack_tokens
from tiercel.wire.frames import Submit

MAX_BYTES = 1 << 58  # more than any machine has


class Large(NextNumber):
    """A model that allocates nothing for a few tokens, and far too much for more."""

    def __init__(self, most_tokens: int = 0, error: Exception | None = None) -> None:
        self._most_tokens = most_tokens
        self._error = error
        self.held: weakref.ref[Tensor] | None = None  # a tensor of the failed forward
        self.failures = 0

    def forward(self, tokens: Tensor, kv: Tensor, state: ForwardState) -> Tensor:
        if len(tokens) > self._most_tokens:
            self.failures += 1
            activations = torch.zeros(len(tokens), 3)
            self.held = weakref.ref(activations)
            if self._error is not None:
                raise self._error
            activations = torch.cat((activations, torch.empty(MAX_BYTES)))
        return super().forward(tokens, kv, state)


@pytest.mark.parametrize("lane", [None, InlineLane()])
@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError("CUDA out of memory")])
def test_a_step_that_runs_out_of_memory_holds_none(lane: InlineLane | None, error: Exception | None) -> None:
    model = Large(error=error)
    bench = Bench(lane, model=model)
    bench.add(1, [3, 4])
    with pytest.raises(OutOfDeviceMemoryError, match="memory") as caught:
        bench.runner.launch(bench.plan((1, 0, 2), fresh=(1,))).result()
    assert caught.value.__cause__ is not None  # the error and its frames are still alive
    assert model.held is not None and model.held() is None


def test_an_out_of_memory_error_of_a_lost_device_is_a_loss() -> None:
    bench = Bench(FullLane(is_dead=True))
    bench.add(1, [3])
    with pytest.raises(DeviceLostError):
        bench.runner.launch(bench.plan((1, 0, 1), fresh=(1,)))


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_streams_continue_in_smaller_forwards(depth: int, is_late: bool) -> None:
    book = SequenceBook(open_policy("fcfs"), 60, ())
    cache = CacheManager(60, BLOCK, b"memory")
    rows, model, client = RowBook(6, 15), Large(most_tokens=3), Client()
    kv = torch.zeros(61, 1, BLOCK, 1, 2)
    lane = CpuDevice(threads=1).open_lane() if is_late else InlineLane()
    runner = Runner(model, kv, Sampler(6, VOCAB, kv.device), lane, rows, book, ())  # type: ignore[arg-type]
    loop = EngineLoop(book, cache, Planner(book, StepLimits(5, 32)), runner, client, MonotonicClock(), depth)
    for seq in range(1, 6):
        params = SamplingParams(temperature=0.0, max_tokens=6)
        prompt = pack_tokens([seq] * 7)
        loop.take([Submit(Request(id=SeqId(seq), prompt=prompt, params=params, arrival_s=0.0))])
    for _ in range(500):
        loop.step()
        if loop.is_idle:
            break
    loop.step()
    lane.close()
    assert {finished.reason for finished in client.finished.values()} == {FinishReason.LENGTH}
    assert client.tokens == {seq: list(range(seq + 1, seq + 7)) for seq in range(1, 6)}
    assert loop.gauges.read().out_of_memory >= 4  # 32, 16, 8 and 4 tokens did not fit
    assert cache.blocks_used == 0

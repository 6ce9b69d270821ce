"""Tests of graphs that need a GPU: they compute the recorded work, share memory, and do not wait."""

import random

import pytest
import torch
from torch import Tensor

from tests.engine.recording import GraphBench, StepBench, WeighedSum, small_decoder
from tiercel.device.base import Device
from tiercel.device.graph import Graph
from tiercel.device.registry import open_device
from tiercel.engine.kernels.sampling import draw_no_sync
from tiercel.engine.step.halves import Overlap
from tiercel.engine.step.mixed_graphs import mixed_sizes
from tiercel.engine.step.staging import open_staging
from tiercel.values.request import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROMPTS = [[3, 1, 4], [1, 5], [9], [2, 6, 5]]


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("cuda")


def test_a_replay_reads_the_current_inputs(device: Device) -> None:
    lane, recorder = device.open_lane(), device.open_recorder()
    assert recorder is not None
    numbers = torch.zeros(1000, 256, dtype=torch.bfloat16, device="cuda")

    def double(rows: int) -> Tensor:
        return (numbers[:rows] * 2).contiguous()

    large, small = lane.run(lambda: [recorder.record(lambda rows=rows: double(rows)) for rows in (1000, 8)]).result()
    for value in (1.0, 3.0):

        def replay(value: float = value) -> tuple[Tensor, Tensor]:
            numbers.fill_(value)
            return large.replay().clone(), small.replay().clone()

        outputs = lane.run(replay).result()
        assert [tuple(output.shape) for output in outputs] == [(1000, 256), (8, 256)]
        assert all(bool((output == 2 * value).all()) for output in outputs)


def test_smaller_graphs_find_room_in_the_memory_of_the_largest(device: Device) -> None:
    lane, recorder = device.open_lane(), device.open_recorder()
    assert recorder is not None
    source = torch.zeros(1 << 26, dtype=torch.uint8, device="cuda")

    def record(length: int) -> Graph:
        return lane.run(lambda: recorder.record(lambda: source[:length] + 1)).result()

    graphs = [record(len(source))]
    device.give_back_cached()
    before = device.free_bytes()
    graphs += [record(len(source) // parts) for parts in (2, 4, 8)]
    device.give_back_cached()
    assert before - device.free_bytes() < len(source) // 2
    assert len(graphs) == 4


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_random_work_in_graphs_gives_the_right_tokens(device: Device, seed: int, depth: int) -> None:
    rng, recorder = random.Random(seed), device.open_recorder()
    assert recorder is not None
    bench = GraphBench(recorder, device, depth=depth, seqs=9, tokens=40, blocks=60, splits=seed % 2 == 1)
    bench.run_random(rng)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_launch_does_not_wait(device: Device, is_recorded: bool) -> None:
    recorder = device.open_recorder() if is_recorded else None
    bench = StepBench(WeighedSum(), 4, recorder, device.open_lane(), "cuda")
    params = SamplingParams(top_k=3, top_p=0.9, seed=1, frequency_penalty=0.5, logprobs=2, max_tokens=5)
    bench.prefill(PROMPTS, params).result()
    bench.decode({1: 3, 2: 2, 4: 3}).result()  # compiles kernels and allocates buffers
    torch.cuda.set_sync_debug_mode("error")
    try:
        flights = [bench.decode({1: 4, 2: 3, 4: 4}), bench.decode({1: 5, 2: 4, 3: 1, 4: 5})]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    outcomes = [flight.result() for flight in flights]
    assert [len(outcome.tokens) for outcome in outcomes] == [3, 4]
    assert all(ms > 0 for outcome in outcomes for ms in outcome.nano_batch_ms)


def test_kernels_of_this_device_address_host_memory(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    lane = device.open_lane()
    staging = open_staging(torch.device("cuda"), lane, maps_host_memory=device.maps_host_memory)
    assert "steps use copies" not in caplog.text
    numbers = torch.arange(100_000).numpy()
    assert lane.run(lambda: staging.fetch_no_sync(staging.send_no_sync(numbers))).result().equal(torch.arange(100_000))


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_decode_step_queues_no_copy(device: Device, is_recorded: bool) -> None:
    recorder = device.open_recorder() if is_recorded else None
    bench = StepBench(WeighedSum(), 4, recorder, device.open_lane(), "cuda", kernel=draw_no_sync)
    bench.prefill(PROMPTS, SamplingParams(temperature=0.8, seed=1, max_tokens=5)).result()
    bench.decode({1: 3, 2: 2, 4: 3}).result()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        bench.decode({1: 4, 2: 3, 4: 4}).result()
    names = [event.name for event in profile.events()]
    assert names and not [name for name in names if name.startswith("Memcpy")]


def test_the_kernels_give_the_same_in_graphs(device: Device) -> None:
    # lazy: CPU builds of torch come without Triton
    from tiercel.engine.attention.triton import TritonAttention
    from tiercel.engine.models.triton_ops import TritonOps

    model = small_decoder(TritonOps(TritonAttention(device.processors)), "cuda")
    printed: list[list[tuple[int, ...]]] = []
    for recorder in (device.open_recorder(), None):
        bench = StepBench(model, 4, recorder, device.open_lane(), "cuda")
        flights = [bench.prefill(PROMPTS, SamplingParams(temperature=0.0, max_tokens=5))]
        flights += [bench.decode({1: 3 + at, 2: 2 + at, 4: 3 + at}) for at in range(4)]
        printed.append([flight.result().tokens for flight in flights])
    assert printed[0] == printed[1]


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("seed", range(3))
def test_random_work_in_mixed_graphs_gives_the_right_tokens(device: Device, seed: int, depth: int) -> None:
    rng, recorder, other = random.Random(seed), device.open_recorder(), device.open_recorder()
    assert recorder is not None and other is not None
    bench = GraphBench(
        recorder, device, depth=depth, seqs=9, tokens=40, blocks=60, splits=seed % 2 == 1,
        mixed_sizes=mixed_sizes(40), mixed_recorder=other,
    )  # fmt: skip
    bench.run_random(rng)
    assert bench.eager.forwards == 0


@pytest.mark.parametrize("is_recorded", [True, False])
def test_halves_give_the_same_as_the_serial_step(device: Device, is_recorded: bool) -> None:
    # lazy: CPU builds of torch come without Triton
    from tiercel.engine.attention.triton import TritonAttention
    from tiercel.engine.models.triton_ops import TritonOps

    fork = device.open_fork()
    assert fork is not None
    model = small_decoder(TritonOps(TritonAttention(device.processors)), "cuda", layers=4)
    printed: list[list[tuple[int, ...]]] = []
    for overlap in (Overlap(fork, lambda rows: True, lambda tokens, decodes: True), None):
        recorder = device.open_recorder() if is_recorded else None
        bench = StepBench(model, 4, recorder, device.open_lane(), "cuda", overlap=overlap)
        flights = [bench.prefill(PROMPTS, SamplingParams(temperature=0.0, max_tokens=5))]
        flights += [bench.decode({1: 3 + at, 2: 2 + at, 4: 3 + at}) for at in range(4)]
        printed.append([flight.result().tokens for flight in flights])
    assert printed[0] == printed[1]

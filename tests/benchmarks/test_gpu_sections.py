"""Helpers of the sections of benchmarks/gpu, without a GPU: checks of kernels in Triton's interpreter, the
engine on the CPU, copies as extents."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import fastswitch_trace
from benchmarks.gpu import (
    attention,
    decode,
    dummy,
    engine,
    inputs,
    kernels,
    layout,
    limits,
    overlap,
    quantized,
    quantized_cases,
    replay,
    swap,
    throughput,
)
from benchmarks.gpu.bare import open_bare
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.bounds import LLAMA_3_8B, ModelShape
from benchmarks.gpu.cases import (
    CASES,
    LAYER,
    Case,
    changed_elsewhere,
    draw_slices,
    make_inputs,
    poisoned,
    relative_error,
)
from benchmarks.gpu.copies import BLOCK_BYTES, GROUP_BLOCKS, Ends, lanes, pieces, rate
from benchmarks.gpu.pool import Pool, arena_tokens
from benchmarks.gpu.traffic import Traffic
from tiercel.device.cpu import CpuDevice
from tiercel.device.extents import Extents
from tiercel.engine.attention.cache_rows import write_rows
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.attention.triton import TritonAttention
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.kernels.product_tiles import ProductTile
from tiercel.engine.measure.stopwatch import Laps
from tiercel.engine.models.dense_routes import open_products
from tiercel.engine.models.device_linear import DeviceLinear
from tiercel.engine.models.quantized_weight import QuantizedWeight
from tiercel.engine.offline import OfflineAnswer, OfflineEngine, OfflineRun
from tiercel.values.outcome import Gauges

CPU = torch.device("cpu")
SMALL = Case("small", 4, 2, 16, longest=40)
in_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


# ---- checks of kernels


@in_interpreter
@pytest.mark.parametrize("kind", kernels.KINDS)
def test_our_attention_passes_its_own_check_in_the_interpreter(kind: str) -> None:
    assert kernels.attention_error(TritonAttention(1), SMALL, kind, torch.float32, CPU) < 1e-3


@in_interpreter
@pytest.mark.slow
def test_our_ops_pass_their_own_checks_in_the_interpreter() -> None:
    assert kernels.ops_error(SMALL, torch.float32, CPU) < 1e-3
    assert kernels.ops_error(SMALL, torch.float16, CPU) < 6e-4  # queries and keys are rounded in the reference, too
    assert kernels.add_norm_error(torch.float32, CPU, rows=2) < 1e-3
    assert kernels.silu_mul_error(torch.float32, CPU, rows=2) < 1e-3
    assert kernels.sampling_error(5000, 6, CPU) == 0.0
    assert kernels.search_error(5000, 10, CPU) < 1e-3


class Wrong:
    """A backend that makes one mistake."""

    def __init__(self, mistake: str) -> None:
        self._mistake = mistake

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams
    ) -> Tensor:
        out = torch.empty_like(query)
        if self._mistake == "reads beside":
            write_rows(key, value, kv, state)
            out[:] = torch.nan_to_num(kv[0, 0, :1, :1]) + kv[-1, 0, :1, :1]
            return out
        good = SdpaAttention().attend(query, key, value, kv, state, params)
        match self._mistake:
            case "forgets a row":
                out[1:] = good[1:]
            case "writes beside":
                out[:] = good
                kv[-1, -1] = 0.0
            case "writes another value":
                out[:] = good
                kv[state.slot_ids[0], state.slot_offsets[0]] += 1.0
            case "is too coarse":
                out[:] = good * 1.03
            case _:
                raise ValueError(self._mistake)
        return out


@pytest.mark.parametrize("mistake", ["forgets a row", "reads beside", "is too coarse"])
def test_a_wrong_output_shows(mistake: str) -> None:
    assert not kernels.attention_error(Wrong(mistake), SMALL, "mixed", torch.float32, CPU) <= kernels.MAX_ERROR


@pytest.mark.parametrize("mistake", ["writes beside", "writes another value"])
def test_a_wrong_cache_shows(mistake: str) -> None:
    with pytest.raises(AssertionError, match="cache"):
        kernels.attention_error(Wrong(mistake), SMALL, "mixed", torch.float32, CPU)


@pytest.mark.parametrize("kind", kernels.KINDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_slices_are_ragged_and_fit_the_case(case: Case, kind: str) -> None:
    slices = draw_slices(case.longest, case.heads, kind)
    assert all(start >= 0 and length >= 1 and start + length <= case.longest for start, length in slices)
    assert len({length for _, length in slices}) > 1 or kind == "decode"
    assert all(length == 1 for _, length in slices) == (kind == "decode")
    assert any(length == 1 for _, length in slices) == (kind != "prefill")


def test_inputs_are_random_at_tokens_and_poisoned_between_them() -> None:
    slices = [(5, 1), (0, 20), (17, 3)]
    inputs = make_inputs(SMALL, slices, torch.float32, CPU, seed=1)
    rows = (~inputs.arena.isnan()).all(dim=-1).all(dim=-1)
    assert rows[:, LAYER].sum() == sum(start for start, _ in slices)
    assert not rows[: 1 + SMALL.spare_slots].any()
    assert not rows[:, 1 - LAYER].any()
    before = inputs.arena.clone()
    write_rows(inputs.key, inputs.value, inputs.arena[:, LAYER], inputs.state)
    assert changed_elsewhere(inputs.arena, before, inputs.state) == 0
    inputs.arena[0, 0] = 1.0
    assert changed_elsewhere(inputs.arena, before, inputs.state) == inputs.arena[0, 0].numel()


def test_one_case_reaches_beyond_32_bits() -> None:
    (far,) = [case for case in CASES if case.name == "far"]
    slot_elements = far.layers * far.block_size * far.kv_heads * 2 * far.head_dim
    assert far.spare_slots * slot_elements > 2**31  # all that is used lies behind them


def test_memory_without_a_value_is_poisoned_for_a_while() -> None:
    with poisoned():
        assert torch.empty(1000).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_error_is_that_of_the_worst_row() -> None:
    wanted = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    got = wanted + torch.tensor([[0.0, 0.0], [0.0, 0.05]])
    assert relative_error(got, wanted) == pytest.approx(0.1)
    assert relative_error(torch.full_like(wanted, torch.nan), wanted) == float("inf")


# ---- one layer


TINY = ModelShape("tiny", 2, 64, 128, 4, 2, 16, 512)


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool(TINY, 320, 2, CPU, torch.float32)


def millisecond(job: Callable[[], object]) -> float:
    """A timer for which every job takes one."""
    job()
    return 1.0


@in_interpreter
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("is_block_first", [True, False])
def test_a_layer_of_either_layout_is_read_right(pool: Pool, block_size: int, is_block_first: bool) -> None:
    state = pool.state([(70, 1), (3, 30)], block_size)
    query, kv = pool.queries(state), pool.layer(block_size, is_block_first=is_block_first)
    assert kv.shape == (320 // block_size, block_size, 2, 32)
    assert kv.is_contiguous() != is_block_first
    out = TritonAttention(1).read(query, kv, state, pool.params)
    key = value = torch.zeros(query.shape[0], 2, 16)
    wanted = SdpaAttention().attend(query, key, value, kv.clone(), state, pool.params)
    assert relative_error(out, wanted) < 1e-3


@in_interpreter
def test_bytes_and_operations_are_those_of_the_slices(pool: Pool, tmp_path: Path) -> None:
    bench = Bench("attention", 60.0, tmp_path / "attention.json")
    backend = TritonAttention(1)
    attention.measure(bench, pool, backend, "decode", [(9, 1), (19, 1)], 1e12, millisecond)
    attention.measure(bench, pool, backend, "prefill", [(0, 4), (2, 3)], 1e12, millisecond)
    decode_figure, prefill_figure = bench.result.figures
    assert decode_figure.value == pytest.approx(
        30 * 2 * 2 * 16 * 2 / 1e9
    )  # bytes of bfloat16 in a millisecond, in TB/s
    assert prefill_figure.value == pytest.approx((1 + 2 + 3 + 4 + 3 + 4 + 5) * 4 * 4 * 16 / 1e9)
    rate, us = layout.decode(pool, [(9, 1), (19, 1)], 16, timer=millisecond)
    assert (rate, us) == (pytest.approx(decode_figure.value), 1000.0)
    assert layout.prefill(pool, backend, [(0, 4), (2, 3)], millisecond)[0] == pytest.approx(prefill_figure.value)


def test_even_contexts_are_as_many_as_uneven_ones_and_have_their_total() -> None:
    even = attention.level(attention.UNEVEN)
    assert len(even) == len(attention.UNEVEN) == 96
    assert sum(even) == sum(attention.UNEVEN) == 95 * 1024 + 128 * 1024
    assert max(even) - min(even) <= 1
    assert attention.singles([3, 1]) == [(2, 1), (0, 1)]


@in_interpreter
def test_the_time_of_partitioning_is_recorded(pool: Pool, tmp_path: Path) -> None:
    bench = Bench("attention", 60.0, tmp_path / "attention.json")
    attention.measure_partition(bench, pool, attention.singles([30, 9]), millisecond)
    (figure,) = bench.result.figures
    assert (figure.name, figure.value, figure.facts) == ("attention.triton.partition.2", 1000.0, {"shares": 4})


@in_interpreter
def test_a_layer_of_the_probe_has_the_products_and_the_attention_of_the_model(pool: Pool) -> None:
    layer = overlap.Layer(pool)
    products, heads = overlap.in_turns([layer.products(3), layer.attention([(9, 1), (0, 5)], 1)])()
    assert [tuple(one.shape) for one in products] == [(3, 128), (3, 64), (3, 256), (3, 64)]
    assert heads.shape == (6, 4, 16)


def test_an_arena_is_as_large_as_a_serving_one_or_as_the_device_allows() -> None:
    token = LLAMA_3_8B.token_bytes
    assert arena_tokens(LLAMA_3_8B, 32, 1000, 140e9) == 100 * 10**9 // token
    assert arena_tokens(LLAMA_3_8B, 32, 1000, 70e9) == int(0.85 * 70e9) // token
    assert arena_tokens(LLAMA_3_8B, 8, 1000, 140e9) == 4 * 100 * 10**9 // token
    assert arena_tokens(LLAMA_3_8B, 32, 10**6, 70e9) == 10**6


def test_blocks_lie_anywhere_in_the_arena_or_as_near_as_they_can(pool: Pool) -> None:
    slices, most = [(31, 1), (40, 8)], 320 // 16 - 1
    wide = {int(slot) for seed in range(20) for slot in pool.state(slices, 16, seed).block_tables.flatten()}
    narrow = pool.state(slices, 16, is_narrow=True).block_tables.flatten().tolist()
    assert wide - {0} == set(range(1, most + 1))
    assert sorted(narrow) == [0, 1, 2, 3, 4, 5]
    assert pool.gb == pytest.approx(320 * 2 * 2 * 32 * 4 / 1e9)


def test_a_decode_reads_more_than_twice_the_cache() -> None:
    hopper, larger = 50 << 20, 126 << 20
    assert [decode.prompt_over(hopper, batch) for batch in decode.BATCHES] == [decode.PROMPT] * 3
    assert decode.prompt_over(larger, 1) * LLAMA_3_8B.token_bytes >= 2 * larger
    assert decode.prompt_over(larger, 32) == decode.PROMPT


@in_interpreter
def test_forms_of_the_decode_kernel_are_compared(pool: Pool, tmp_path: Path) -> None:
    bench = Bench("layout", 60.0, tmp_path / "layout.json")
    times = iter((1.0, 4.0, 0.5, 2.0))

    def timer(job: Callable[[], object]) -> float:
        job()
        return next(times)

    layout.forms(bench, pool, {"many": [(9, 1), (19, 1)], "one": [(200, 1)]}, timer)

    assert [figure.name for figure in bench.result.figures] == [
        *("layout.form.plain.many", "layout.form.plain.one", "layout.form.folded.many", "layout.form.folded.one"),
        "layout.form_best",
    ]
    assert bench.result.figures[-1].value == pytest.approx(2.0)
    assert bench.result.figures[-1].facts == {"form": "folded"}


@in_interpreter
def test_ways_of_products_are_compared_with_the_default_and_one_may_fail(tmp_path: Path) -> None:
    bench = Bench("limits", 60.0, tmp_path / "limits.json")
    times = iter((1.0, 0.5))

    def timer(job: Callable[[], object], rep_ms: int) -> float:
        job()
        return next(times)

    limits.routes(bench, 3, "qkv", (16, 24), open_products(2), CPU, timer)  # a build for the CPU has no cuBLASLt

    (figure,) = bench.result.figures
    assert (figure.name, figure.value, figure.facts["us"]) == ("limits.route.3.qkv.triton", 2.0, 500.0)
    assert [failure.part for failure in bench.result.failures] == ["route 3 qkv cublaslt"]


def test_a_budget_that_ends_has_seen_tiles_of_both_kinds() -> None:
    kinds = [kind for kind, _ in layout.alternate(layout.DECODE_TILES, layout.PREFILL_TILES)]
    assert kinds[:4] == ["decode", "prefill", "decode", "prefill"]
    assert len(kinds) == len(layout.DECODE_TILES) + len(layout.PREFILL_TILES)


# ---- the engine, on the CPU


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, object]:
    """Flags for a tiny model of random weights."""
    model = dummy.write_model(tmp_path / "tiny", dummy.TINY)
    return {"model": str(model), "device": "cpu", "threads": 1, "max_num_seqs": 8, "max_model_len": 320}


def open_tiny(folder: Path, flags: dict[str, object]) -> OfflineEngine:
    return engine.open_engine(engine.engine_settings(folder, **flags, num_gpu_blocks_override=160))


def test_throughput_and_decode_record_their_figures(tmp_path: Path, tiny: dict[str, object]) -> None:
    with open_tiny(tmp_path, tiny) as opened:
        first = Bench("throughput", 60.0, tmp_path / "throughput.json")
        mix = throughput.Mix(24, 6, 10)
        assert throughput.measure(first, opened, mix) > 0
        second = Bench("decode", 60.0, tmp_path / "decode.json")
        decode.measure(second, opened, 3, prompt=20, output=12)
        assert engine.draw(opened, 2, 5, 3, seed=1) == engine.draw(opened, 2, 5, 3, seed=1)
    printed = {figure.name: figure for figure in [*first.result.figures, *second.result.figures]}
    assert printed["throughput.24_6.total_tokens_per_s"].facts["requests"] == 10
    assert {"throughput.24_6.output_tokens_per_s", "decode.batch_3.share", "decode.batch_3.step_ms"} <= printed.keys()
    assert printed["decode.batch_3.share"].value > 0
    context = printed["decode.batch_3.share"].facts["mean_context"]
    assert isinstance(context, float)
    assert 20 < context < 32
    assert len((tmp_path / "requests-24_6.jsonl").read_text().splitlines()) == 10


def test_a_slow_engine_gets_fewer_requests_of_a_mix() -> None:
    mix = throughput.Mix(1024, 512, 704)
    assert mix.within(2e6) == mix
    assert mix.within(768_000) == throughput.Mix(1024, 512, 500)
    assert mix.within(0.0).count == 1


def test_only_steps_in_which_every_sequence_decodes_count() -> None:
    laps = Laps()
    for _ in range(6):  # steps of a second
        for part, seconds in ((laps.plan_s, 0.1), (laps.launch_s, 0.1), (laps.wait_s, 0.7), (laps.commit_s, 0.1)):
            part.append(seconds)
    empty = np.array(())
    times = ((1.0, 6.0), (2.0, 5.5))
    answers = tuple(OfflineAnswer(empty, *two, empty) for two in times)  # type: ignore[arg-type]
    run = OfflineRun(answers, 6.0, laps, Gauges(), Gauges())
    steps = engine.full_steps(run)
    assert [round(seconds, 6) for seconds, _ in steps] == [1.0, 1.0]  # those that end at 4 and at 5
    assert engine.step_ms(run) == pytest.approx(1000)
    with pytest.raises(ValueError, match="no step"):
        engine.step_ms(OfflineRun(answers[:1], 1.0, Laps(), Gauges(), Gauges()))


def test_a_victim_is_swapped_and_restored(tmp_path: Path, tiny: dict[str, object]) -> None:
    settings = engine.engine_settings(
        tmp_path,
        **tiny,
        cpu_device_pool="true",
        kv_host_size="4M",
        num_gpu_blocks_override=20,
        preemption_mode="swap",
        scheduling_policy="priority",
        enable_prefix_caching="true",
    )
    with open_bare(settings) as bare:
        switch = swap.Switch(bare, victim_tokens=120, rival_tokens=200, vocab=500)
        assert all(switch.round(number) > 0 for number in range(2))


def test_conversations_swap_repeatedly_and_all_are_completed(tmp_path: Path, tiny: dict[str, object]) -> None:
    settings = engine.engine_settings(
        tmp_path,
        **{**tiny, "max_model_len": 208},
        cpu_device_pool="true",
        kv_host_size="8M",
        num_gpu_blocks_override=14,
        preemption_mode="swap",
        scheduling_policy="priority",
        enable_prefix_caching="true",
    )
    trace = [replace(talk, arrival_s=0.0) for talk in fastswitch_trace.conversations(6, seed=0, scale=0.03)]
    bench = Bench("replay", 60.0, tmp_path / "replay.json")
    rows = fastswitch_trace.priorities("random", len(trace), 1)
    with open_bare(settings) as bare:
        played = replay.Replay(bare, trace, rows, frequency=0.5)
        replay.say(bench, bare.engine, played, 60.0)
    assert played.turns == len(played.waits_s) == sum(len(talk.turns) for talk in trace)
    assert len(played.waits_s) + len(played.gaps_s) == sum(turn.answer_tokens for talk in trace for turn in talk.turns)
    printed = {figure.name: figure for figure in bench.result.figures}
    assert printed.keys() == {"replay.idle_share", "replay.copy_mib", "replay.ttft_p99_s", "replay.tbt_p999_s"}
    assert printed["replay.idle_share"].facts["is_whole"] is True
    preemptions = printed["replay.idle_share"].facts["preemptions"]
    assert isinstance(preemptions, int)
    assert preemptions > 0


# ---- settings of the sections


def test_saturated_runs_have_no_goal_between_tokens(tmp_path: Path) -> None:
    found = engine.engine_settings(tmp_path, max_num_seqs=throughput.SEQUENCES)
    assert (found.tbt_goal_s, found.calibration_s) == (0, 0)


# ---- copies


@pytest.mark.parametrize("group", [1, 4])
def test_pieces_lie_anywhere_and_touch_nothing_twice(group: int) -> None:
    total, piece, source, target = 1 << 20, 4096, 1 << 30, 1 << 40
    extents = pieces(source, target, piece, total, seed=3, group=group)
    assert set(extents.sizes.tolist()) == {piece * group}
    for addresses, start in ((extents.sources, source), (extents.targets, target)):
        places = (addresses - np.uint64(start)) // np.uint64(piece * group)
        assert len(set(places.tolist())) == len(extents) == total // (piece * group)
        assert int(addresses.min()) >= start
        assert int(addresses.max()) + piece * group <= start + total
    assert extents.sources.tolist() != sorted(extents.sources.tolist())


def test_a_rate_leaves_the_first_turn_out() -> None:
    turns: list[int] = []
    assert rate(lambda: turns.append(1), 1 << 30) > 0
    assert len(turns) == 4


def _shuffled(size: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_lanes_move_every_byte_both_ways_and_report_their_speed(tmp_path: Path) -> None:
    device, total = CpuDevice(1), 1 << 20
    ends = Ends(device, total, CPU)
    source = _shuffled(total)
    ends.devices[0][:], ends.hosts[1][:] = source, source
    bench = Bench("copies", 60.0, tmp_path / "copies.json")
    lanes(bench, ends, total, 4, "4_kib", (device.open_copy_lane(), device.open_copy_lane()), 2)
    for target in (ends.hosts[0], ends.devices[1]):
        assert not torch.equal(target, source)  # every piece lies elsewhere
        assert torch.equal(target.view(-1, 8192).sum(1).sort()[0], source.view(-1, 8192).sum(1).sort()[0])
    assert [figure.name for figure in bench.result.figures] == [
        "copies.down_4_kib", "copies.up_4_kib", "copies.both_down_4_kib", "copies.both_up_4_kib"
    ]  # fmt: skip
    assert all(figure.facts == {"kib": 8, "copies": 128} for figure in bench.result.figures)
    ends.close()


def test_traffic_keeps_both_ways_busy_while_it_lasts() -> None:
    device, total = CpuDevice(1), BLOCK_BYTES * GROUP_BLOCKS
    ends = Ends(device, total, CPU)
    ends.devices[0].fill_(1)
    ends.hosts[1].fill_(2)
    traffic = Traffic(device, ends, total)
    with traffic:
        while not (ends.hosts[0][-1] == 1 and ends.devices[1][-1] == 2):
            time.sleep(0.001)
    traffic.close()
    assert traffic.gb_per_s.keys() == {"down", "up"}
    ends.close()


class DeepLane:
    """A copy lane that copies when asked for the result, and notes how many batches are queued."""

    depth = 2

    def __init__(self, log: list[int]) -> None:
        self._log = log
        self._queued = 0

    def copy(self, extents: Extents) -> "DeepLane":
        self._queued += 1
        return self

    def result(self) -> None:
        self._log.append(self._queued)
        self._queued -= 1

    def close(self) -> None:
        assert self._queued == 0


class DeepDevice(CpuDevice):
    """The CPU with lanes on which two batches can be queued."""

    def __init__(self) -> None:
        super().__init__(1)
        self.logs: list[list[int]] = []

    def open_copy_lane(self) -> DeepLane:  # type: ignore[override]
        self.logs.append([])
        return DeepLane(self.logs[-1])


def test_traffic_keeps_a_batch_queued_behind_the_one_that_is_copied() -> None:
    device, total = DeepDevice(), BLOCK_BYTES * GROUP_BLOCKS
    ends = Ends(device, total, CPU)
    traffic = Traffic(device, ends, total)
    with traffic:
        while not all(len(log) >= 5 for log in device.logs):
            time.sleep(0.001)
    traffic.close()
    for log in device.logs:
        assert log[:5] == [2] * 5
        assert log[-1] == 1  # the last one is waited for, too
    ends.close()


@in_interpreter
@pytest.mark.parametrize("words", [1, 1023, 8192])
def test_a_kernel_reads_every_word_of_host_memory_and_no_more(words: int) -> None:
    source, target = torch.arange(1, 10_001), torch.zeros(10_000, dtype=torch.int64)
    inputs.read_mapped(source[:words], target[:words])
    assert torch.equal(target[:words], source[:words])
    assert not target[words:].any()


@in_interpreter
def test_the_wait_of_inputs_is_that_beside_transfers_less_that_without(tmp_path: Path) -> None:
    device, total = CpuDevice(1), BLOCK_BYTES * GROUP_BLOCKS
    ends = Ends(device, total, CPU)
    bench = Bench("copies", 60.0, tmp_path / "copies.json")
    source = torch.arange(inputs.BYTES // 8)
    middles = iter((10.0, 1200.0, 9000.0, 12.0, 13.0, 14.0))

    def samples(job: Callable[[], object]) -> list[float]:
        job()
        middle = next(middles)
        return [middle - 1, middle, middle + 100]

    inputs.measure(bench, device, ends, total, source, torch.zeros_like(source), samples)

    told = {figure.name.removeprefix("copies.inputs."): figure for figure in bench.result.figures}
    assert {name: figure.value for name, figure in told.items() if name.endswith("wait_us")} == {
        "copy.pieces.wait_us": 1190.0,
        "copy.whole.wait_us": 8990.0,
        "mapped.pieces.wait_us": 1.0,
        "mapped.whole.wait_us": 2.0,
    }
    assert told["copy.whole_us"].facts["worst_us"] == 9100.0
    with pytest.raises(AssertionError, match="the target differs"):
        inputs.measure(bench, device, ends, total, source, torch.zeros_like(source), lambda _: [1.0])
    ends.close()


# ---- weights of 4 and 8 bits


@in_interpreter
@pytest.mark.parametrize("scheme", quantized_cases.SCHEMES)
@pytest.mark.sampled(2)
def test_quantised_products_pass_their_own_check_in_the_interpreter(scheme: str) -> None:
    shapes = (128, 256), (40, 96)
    assert quantized_cases.product_error(scheme, torch.float32, CPU, shapes, rows=(1, 20)) < 1e-4


@in_interpreter
def test_a_weight_that_is_read_wrong_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = quantized_cases.open_product

    def wrong(weight: QuantizedWeight, device: torch.device) -> DeviceLinear:
        offsets = torch.zeros_like(weight.scales) if weight.offsets is None else weight.offsets
        return right(replace(weight, values=weight.values & 15, offsets=offsets + weight.scales), device)

    monkeypatch.setattr(quantized_cases, "open_product", wrong)
    error = quantized_cases.product_error("int4_zeros", torch.float32, CPU, ((40, 96),), rows=(20,))
    assert error > kernels.MAX_ERROR


@in_interpreter
def test_products_and_tiles_of_weights_of_4_bits_record_their_figures(tmp_path: Path) -> None:
    bench = Bench("quantized", 60.0, tmp_path / "quantized.json")
    quantized.products(bench, "int4", 2, {"qkv": (48, 256), "down": (32, 128)}, CPU, millisecond)
    few = ProductTile(16, 32, 4, 2), ProductTile(32, 32, 4, 2), ProductTile(64, 32, 4, 2)
    quantized.tiles(bench, "int4", 40, (48, 256), CPU, millisecond, few)
    assert not bench.result.failures
    product, tile = bench.result.figures
    assert (product.name, product.value, product.facts["us"]) == ("quantized.gemm.2.int4", 1.0, 2000.0)
    read_bytes = (48 * 256 + 32 * 128) / 2 + (48 * 2 + 32) * 2  # in two milliseconds
    assert product.facts["weights_tb_per_s"] == pytest.approx(read_bytes / 2 / 1e9)
    assert (tile.name, tile.facts["tried"]) == ("quantized.tile.int4.40.best", 2)


@pytest.mark.parametrize("name", quantized.CONFIGS)
@pytest.mark.slow
def test_steps_of_each_scheme_are_recorded_beside_those_of_bfloat16(
    name: str, tmp_path: Path, tiny: dict[str, object]
) -> None:
    config = dummy.TINY | {"hidden_size": 128, "head_dim": 32, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    flags = tiny | {"model": str(quantized.write_quantized_model(tmp_path, config, name)), "max_num_seqs": 2}
    bench = Bench("quantized", 60.0, tmp_path / "quantized.json")
    with open_tiny(tmp_path, flags) as opened:
        ms = quantized.measure_steps(bench, opened, f"step.{name}.batch_2", 2, 10.0, prompt=20, output=8)
    told = {figure.name: figure.value for figure in bench.result.figures}
    assert told[f"quantized.step.{name}.batch_2.step_ms"] == ms
    assert told[f"quantized.step.{name}.batch_2.ratio"] == pytest.approx(10.0 / ms)

"""Steps during copies, and the time until a preempted sequence runs again."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median

from benchmarks.gpu.bare import Bare, open_bare
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.copies import BLOCK_BYTES, TOTAL_BYTES, Ends, pieces, rate
from benchmarks.gpu.engine import VOCAB, asked, draw, engine_settings, open_engine, step_ms
from benchmarks.gpu.traffic import Traffic
from tiercel.device.base import Device
from tiercel.device.cuda import open_cuda
from tiercel.values.errors import TiercelError
from tiercel.values.ids import SeqId
from tiercel.values.request import Request, SamplingParams, pack_tokens
from tiercel.wire.frames import Submit

STREAMS, PROMPT, OUTPUT = 64, 1024, 160
TURNS = 3  # of busy and idle each, alternating
VICTIM_TOKENS, RIVAL_TOKENS = 4096, 7000
POOL_BLOCKS = 520  # too few for both sequences
VICTIM_SAYS, RIVAL_SAYS = 24, 8  # tokens
ROUNDS = 6  # the first warms up
_PREEMPTED_S = 15.0  # time needed for the second part


def run(bench: Bench) -> None:
    """Figures `step_ratio` and `return_ratio`, and their components."""
    device = open_cuda()
    ends = Ends(device, TOTAL_BYTES // 2)
    try:
        with bench.part("steps beside copies"):
            beside_copies(bench, device, ends)
        if bench.has_time("a preempted sequence", 5.0):
            with bench.part("a preempted sequence"):
                preempted(bench, device, ends)
    finally:
        ends.close()


def beside_copies(bench: Bench, device: Device, ends: Ends) -> None:
    """Measure the median decoding step of 64 sequences, alternately with both directions busy and idle."""
    flags = {"max_num_seqs": STREAMS, "max_num_batched_tokens": 8192, "max_model_len": 2048}
    flags["num_gpu_blocks_override"] = 2 * STREAMS * (PROMPT + OUTPUT) // 16  # another engine follows
    traffic = Traffic(device, ends, TOTAL_BYTES // 2)
    ms: dict[bool, list[float]] = {False: [], True: []}
    with open_engine(engine_settings(bench.folder, **flags, kv_host_size="0")) as engine:
        engine.run(asked(draw(engine, STREAMS, 64, 16, seed=99)))
        turn_s = 0.0
        for turn in range(1 if bench.is_quick else TURNS):
            if turn and not bench.has_time(f"turn {turn + 1}", _PREEMPTED_S + turn_s):
                break
            before_s = bench.left_s
            for is_busy in (False, True) if turn % 2 == 0 else (True, False):
                with traffic if is_busy else nullcontext():
                    ran = engine.run(asked(draw(engine, STREAMS, PROMPT, OUTPUT, seed=turn)))
                ms[is_busy].append(step_ms(ran))
            turn_s = before_s - bench.left_s
    traffic.close()
    idle, busy = median(ms[False]), median(ms[True])
    bench.record(
        "step_ratio", busy / idle, "x", idle_ms=idle, busy_ms=busy, turns=len(ms[True]), streams=STREAMS, context=PROMPT
    )
    for way, gb_per_s in traffic.gb_per_s.items():
        bench.record(f"{way}_beside_steps", gb_per_s, "GB/s")


def preempted(bench: Bench, device: Device, ends: Ends) -> None:
    """Measure the time from the end of the rival to the victim's next token, over the plain copy of its blocks."""
    size = VICTIM_TOKENS // 16 * BLOCK_BYTES
    lane = device.open_copy_lane()
    extents = pieces(ends.hosts[1].data_ptr(), ends.devices[1].data_ptr(), BLOCK_BYTES, ends.hosts[1].nbytes, 2)
    gb_per_s = rate(lambda: lane.copy(extents).result(), int(extents.sizes.sum()))
    lane.close()
    bare_ms = 1e3 * size / (gb_per_s * 1e9)
    settings = engine_settings(
        bench.folder,
        max_num_seqs=8,
        max_num_batched_tokens=8192,
        max_model_len=8192,
        num_gpu_blocks_override=POOL_BLOCKS,
        kv_host_size="4G",
        preemption_mode="swap",
        scheduling_policy="priority",
        enable_prefix_caching="true",
        calibration_seconds=1.5,  # a plan waits for a restore only where the ends of steps are predicted
    )
    with open_bare(settings) as bare:
        switch = Switch(bare)
        waits_ms = [switch.round(number) for number in range(3 if bench.is_quick else ROUNDS)][1:]
    back_ms = median(waits_ms)
    bench.record(
        "return_ratio",
        back_ms / bare_ms,
        "x",
        back_ms=back_ms,
        bare_copy_ms=bare_ms,
        worst_ms=max(waits_ms),
        rounds=len(waits_ms),
        tokens=VICTIM_TOKENS,
    )


class Switch:
    """A sequence that is preempted by another one of a higher band, repeatedly."""

    def __init__(
        self,
        bare: Bare,
        *,
        victim_tokens: int = VICTIM_TOKENS,
        rival_tokens: int = RIVAL_TOKENS,
        vocab: int = VOCAB,
    ) -> None:
        self._engine = bare.engine
        self._inbox = bare.inbox
        self._clock = bare.clock
        self._victim_tokens = victim_tokens
        self._rival_tokens = rival_tokens
        self._vocab = vocab
        self._next = 1

    def round(self, number: int) -> float:
        """Return the milliseconds from the rival's last token to the victim's next token. Errors: TiercelError."""
        before = self._engine.loop.gauges.read()
        self._inbox.clear()
        victim = self._submit(self._victim_tokens, VICTIM_SAYS * 4, 5, seed=2 * number)
        self._step_until(lambda: len(self._times_s(victim)) >= VICTIM_SAYS)
        rival = self._submit(self._rival_tokens, RIVAL_SAYS, 0, seed=2 * number + 1)
        self._step_until(lambda: len(self._times_s(rival)) >= RIVAL_SAYS)
        freed_s = self._times_s(rival)[-1]
        self._step_until(lambda: self._inbox.ended >= 2)
        after = self._engine.loop.gauges.read()
        if after.preemptions == before.preemptions or after.swapped_tokens == before.swapped_tokens:
            raise TiercelError("bench.not_swapped", "the victim was not swapped", round=number)
        return 1e3 * min(at_s - freed_s for at_s in self._times_s(victim) if at_s > freed_s)

    def _submit(self, prompt: int, output: int, band: int, seed: int) -> SeqId:
        rng = random.Random(seed)
        seq, self._next = SeqId(self._next), self._next + 1
        request = Request(
            id=seq,
            prompt=pack_tokens(rng.choices(range(self._vocab), k=prompt)),
            params=SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True),
            arrival_s=self._clock.now_s(),
            band=band,
        )
        self._engine.loop.take([Submit(request)])
        return seq

    def _step_until(self, is_done: Callable[[], bool]) -> None:
        end_s = self._clock.now_s() + 30.0
        while not is_done():
            self._engine.upkeep.tend()
            self._engine.loop.step()
            if self._clock.now_s() > end_s:
                raise TiercelError("bench.stuck", "30 s without what was waited for")

    def _times_s(self, seq: SeqId) -> list[float]:
        """Return the time at which each token of a sequence was reported."""
        return [at_s for at_s, report in self._inbox.reports if seq in memoryview(report.seqs).cast("Q")]

"""Context switches on the device: the conversations of `benchmarks/fastswitch.py` in real time.

Each conversation is a tenant, and its band changes every few steps as given by the trace, so running sequences are
preempted. The device tier holds 40 % of the open conversations at the peak. Section `switches` compares variants in
virtual time.
"""

import heapq
import select
from array import array
from collections.abc import Iterator, Sequence

from benchmarks import checks, fastswitch_replay, fastswitch_trace
from benchmarks.gpu.bare import Bare, open_bare
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engine import engine_settings
from tiercel.engine.assembly import Engine
from tiercel.values.errors import TiercelError
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import RouteGauges
from tiercel.values.request import Request, SamplingParams
from tiercel.values.tenant import LAST_BAND, Tenants, TenantShare
from tiercel.values.tier import Route
from tiercel.wire.frames import SetTenants, Submit

CONVERSATIONS = 24
SEED = 2
PATTERN: fastswitch_trace.Pattern = "markov"
FREQUENCY = 0.04  # updates per step
_SWAPS = (Route.SPILL, Route.RESTORE)


class Replay:
    """The clients of one engine."""

    def __init__(
        self,
        bare: Bare,
        trace: Sequence[fastswitch_trace.Conversation],
        rows: Iterator[list[float]],
        frequency: float = FREQUENCY,
    ) -> None:
        self._engine = bare.engine
        self._inbox = bare.inbox
        self._wake = bare.wake
        self._clock = bare.clock
        self._trace = trace
        self._rows = rows
        self._frequency = frequency
        self._row: list[float] = next(rows)
        self._updates = 0
        self._due = [(talk.arrival_s, number) for number, talk in enumerate(trace)]  # heap of the next turns
        heapq.heapify(self._due)
        self._histories = [array("I") for _ in trace]
        self._next_turns = [0] * len(trace)
        self._talk_by_seq: dict[int, int] = {}
        self._heard_s: dict[int, float] = {}  # time of the request or of the last token
        self._saying: set[int] = set()  # sequences with at least one token
        self.turns = 0
        self.steps = 0
        self.idle_s = 0.0  # requests were open, and no step ran
        self.waits_s: list[float] = []  # until first tokens
        self.gaps_s: list[float] = []  # between tokens

    def run(self, most_s: float) -> float:
        """Run until all requests have ended, or until the time limit. Return seconds."""
        heapq.heapify(self._due)
        began_s = self._clock.now_s()
        self._set_bands()
        while (self._due or not self._engine.loop.is_idle) and self._clock.now_s() - began_s < most_s:
            self._ask(began_s)
            if self._engine.loop.step():
                self.steps += 1
                if int(self.steps * self._frequency) > self._updates:
                    self._row = next(self._rows)
                    self._updates += 1
                    self._set_bands()
            else:
                self._rest()
            self._engine.upkeep.tend()
            self._hear(began_s)
        return self._clock.now_s() - began_s

    def _ask(self, began_s: float) -> None:
        """Send the turns that are due."""
        while self._due and began_s + self._due[0][0] <= self._clock.now_s():
            due_s, talk = heapq.heappop(self._due)
            turn = self._trace[talk].turns[self._next_turns[talk]]
            self._next_turns[talk] += 1
            self._histories[talk].extend(turn.question)
            seq = SeqId(len(self._talk_by_seq) + 1)
            self._talk_by_seq[seq] = talk
            self._heard_s[seq] = began_s + due_s
            request = Request(
                id=seq,
                prompt=self._histories[talk].tobytes(),
                params=SamplingParams(temperature=0.0, max_tokens=turn.answer_tokens, ignore_eos=True),
                arrival_s=began_s + due_s,
                tenant=_tenant(talk),
                band=self._band(talk),
            )
            self._engine.loop.take([Submit(request)])

    def _band(self, talk: int) -> int:
        return min(LAST_BAND, int((LAST_BAND + 1) * (1 - self._row[talk])))

    def _set_bands(self) -> None:
        shares = tuple(TenantShare(name=_tenant(talk), band=self._band(talk)) for talk in range(len(self._trace)))
        self._engine.loop.take([SetTenants(Tenants(self._updates + 1, shares))])

    def _rest(self) -> None:
        """Sleep until a copy lands or a turn is due, because nothing can be computed."""
        before_s, is_idle = self._clock.now_s(), self._engine.loop.is_idle
        select.select([self._wake], [], [], 0.001)
        self._wake.clear()
        if not is_idle:
            self.idle_s += self._clock.now_s() - before_s

    def _hear(self, began_s: float) -> None:
        """Take the tokens since the last call. Errors: TiercelError for an answer of another length than drawn."""
        reports = list(self._inbox.reports)
        self._inbox.clear()
        for at_s, report in reports:
            tokens = memoryview(report.tokens).cast("I")
            for seq, token in zip(memoryview(report.seqs).cast("Q"), tokens, strict=True):
                (self.gaps_s if seq in self._saying else self.waits_s).append(at_s - self._heard_s[seq])
                self._saying.add(seq)
                self._heard_s[seq] = at_s
                self._histories[self._talk_by_seq[seq]].append(token)
            for finished in report.finished:
                self.turns += 1
                talk = self._talk_by_seq[finished.seq]
                turns, number = self._trace[talk].turns, self._next_turns[talk]
                wanted = turns[number - 1].answer_tokens
                if finished.num_outputs != wanted:
                    raise TiercelError("bench.cut", finished.error or finished.reason.value, talk=talk, wanted=wanted)
                if number < len(turns):
                    heapq.heappush(self._due, (at_s - began_s + turns[number].think_s, talk))


def _tenant(talk: int) -> TenantId:
    return TenantId(f"talk-{talk}")


def run(bench: Bench) -> None:
    """Record `idle_share`, `copy_mib`, `ttft_p99_s`, `tbt_p999_s`."""
    trace = fastswitch_trace.conversations(CONVERSATIONS // (2 if bench.is_quick else 1), SEED)
    blocks = fastswitch_replay.budget_blocks(fastswitch_replay.endless(trace))
    settings = engine_settings(
        bench.folder,
        max_num_seqs=256,
        max_model_len=8192,
        num_gpu_blocks_override=max(blocks, 8192 // 16 + 2),
        kv_host_size="16G",
        preemption_mode="swap",
        scheduling_policy="priority",
        enable_prefix_caching="true",
    )
    with open_bare(settings) as bare:
        rows = fastswitch_trace.priorities(PATTERN, len(trace), SEED)
        say(bench, bare.engine, Replay(bare, trace, rows), bench.left_s)


def say(bench: Bench, engine: Engine, replay: Replay, most_s: float) -> None:
    """Run the replay and record its figures."""
    took_s = replay.run(most_s)
    gauges = engine.loop.gauges.read()
    swaps: list[RouteGauges] = [one for one in gauges.routes if one.route in _SWAPS]
    size, copies = sum(one.bytes for one in swaps), sum(one.copies for one in swaps)
    is_whole = engine.loop.is_idle
    facts = {"seconds": took_s, "steps": replay.steps, "preemptions": gauges.preemptions, "is_whole": is_whole}
    bench.record("idle_share", replay.idle_s / took_s, "", **facts)
    if copies:
        bench.record("copy_mib", size / copies / 2**20, "MiB", swapped_gb=size / 1e9, copies=copies)
    bench.record("ttft_p99_s", checks.percentile(replay.waits_s, 0.99), "s", turns=replay.turns)
    bench.record("tbt_p999_s", checks.percentile(replay.gaps_s, 0.999), "s", tokens=len(replay.gaps_s))
    if not is_whole:
        bench.result.left_out.append("the end of the trace")

"""Both gates, the usages and the engine client in front of a simulated engine, in virtual time.

Everything between the HTTP handler and the machine is the real code: `Admission`, `UsageBook`, `EngineClient`, the
frames, the loop, planner, policy and cache books. Only the machine takes its time from a table.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from tiercel.scheduler.cost import linear_times
from tiercel.server.client.client import EngineClient
from tiercel.server.client.collector import Mailbox
from tiercel.server.client.sequences import SequenceFacts, SequenceStart
from tiercel.server.tenancy.admission import Admission, AdmissionRequest, ServiceLevel
from tiercel.server.tenancy.tenants import Tenant, make_table
from tiercel.server.tenancy.usage import UsageBook
from tiercel.simulation.simulator import SimSettings, Simulation
from tiercel.simulation.workload import PromptPart, prompt_bytes
from tiercel.values.errors import AdmissionError
from tiercel.values.ids import TenantId
from tiercel.values.outcome import Finished, Gauges
from tiercel.values.request import SamplingParams
from tiercel.values.tenant import Tenants
from tiercel.wire.frames import FrameReader, Ready, Report, SetTenants, Submit, ToEngine, encode_frame

MACHINE = SimSettings(
    times=linear_times(base_ms=3.0, prefill_ms=0.1, decode_ms=0.5, context_ms=0.0002),
    blocks=2048,
    max_num_seqs=64,
    max_num_batched_tokens=256,
    tbt_goal_ms=200.0,
    noise=0.1,
)
"""A machine for about nine requests of 96 + 24 tokens per second and as much work in requests of 512 + 64."""


@dataclass(slots=True)
class Sent:
    """One request and its outcome."""

    at_s: float
    tenant: Tenant
    prompt: int  # tokens
    outputs: int
    status: int = 0  # 0 = not sent
    service: ServiceLevel | None = None
    facts: SequenceFacts | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds from its time of sending to its first token; infinite without one."""
        first_s = None if self.facts is None else self.facts.first_token_s
        return float("inf") if first_s is None else first_s - self.at_s

    @property
    def is_complete(self) -> bool:
        """True when it ended and has output tokens."""
        return self.facts is not None and self.facts.finished is not None and self.facts.num_outputs > 0


class _Silent:
    """An observer and counter that does nothing."""

    def on_ready(self, ready: Ready) -> None: ...
    def on_first_token(self, facts: SequenceFacts, now_s: float) -> None: ...
    def on_tokens(self, tenant: TenantId, count: int, gap_s: float) -> None: ...
    def on_finished(self, facts: SequenceFacts, finished: Finished, now_s: float) -> None: ...
    def on_resumed(self, tokens: int, num_found: int) -> None: ...
    def on_step(self, gauges: Gauges) -> None: ...
    def on_rejected(self, reason: str) -> None: ...
    def on_throttled(self, tenant: TenantId, reason: str) -> None: ...


class _Wire:
    """The transport of the client; messages wait for the next turn of the simulated engine."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self._reader: FrameReader[ToEngine] = FrameReader(cast(type[ToEngine], ToEngine))

    def write(self, data: bytes) -> None:
        self.sent += self._reader.feed(data)

    def is_closing(self) -> bool:
        return False


@dataclass
class Overloaded:
    """A server with these tenants."""

    tenants: Sequence[Tenant]
    settings: SimSettings = MACHINE
    max_queued: int = 1024

    def run(self, requests: Sequence[Sent], until_s: float) -> list[Sent]:
        """Send requests at their times; stop when all have ended, at the latest at `until_s`."""
        self._simulation = simulation = Simulation(self.settings, [tenant.share for tenant in self.tenants])
        usages = UsageBook(simulation.clock, self.settings.policy)
        usages.set_table(make_table(self.tenants, version=1, source="file"))
        silent, self._wire = _Silent(), _Wire()
        self._client = EngineClient(simulation.clock, silent, usages)
        self._client.connection.connection_made(self._wire)  # type: ignore[arg-type]
        ready = Ready(
            max_model_len=32_768, vocab_size=65_536, block_size=16, blocks_total=1, dtype="float32", kv_dtype="float32",
            device="cpu", model_impl="native", weights_bytes=1, kv_bytes=1, load_s=0.0,
        )  # fmt: skip
        self._client.connection.data_received(encode_frame(ready))
        self._admission = Admission(
            self._client.sequences, silent, simulation.clock, usages, max_queued=self.max_queued
        )
        self._due = sorted(requests, key=lambda one: -one.at_s)
        simulation.tally.receiver = self._deliver
        simulation.loop.take([SetTenants(Tenants(1, tuple(tenant.share for tenant in self.tenants)))])
        while simulation.now_s < until_s:
            self._send_due()
            next_s = self._due[-1].at_s if self._due else until_s
            if not simulation.step(min(next_s, until_s)):
                if not self._due and simulation.loop.is_idle:
                    break
                simulation.pass_time(min(next_s, until_s))
        return list(requests)

    def _deliver(self, report: Report) -> None:
        """Admit the requests that came during the step, then deliver its report."""
        self._admit_due()
        self._client.connection.data_received(encode_frame(report))
        self._simulation.tally.count(report, self._simulation.now_s)

    def _send_due(self) -> None:
        self._admit_due()
        sent, self._wire.sent = self._wire.sent, []
        for message in sent:
            if isinstance(message, Submit):
                self._simulation.tally.submit(message.request.id, message.request.tenant)
                self._simulation.loop.take([message])

    def _admit_due(self) -> None:
        while self._due and self._due[-1].at_s <= self._simulation.now_s:
            self._submit(self._due.pop())

    def _submit(self, sent: Sent) -> None:
        request = AdmissionRequest(prompts=[sent.prompt], max_tokens=sent.outputs)
        try:
            with self._admission.enter(sent.tenant) as entry:
                terms = entry.admit(request)
                start = SequenceStart(
                    prompt=prompt_bytes((PromptPart(id(sent), sent.prompt),)),
                    num_prompt=sent.prompt,
                    params=SamplingParams(
                        temperature=0.0, max_tokens=terms.max_tokens or sent.outputs, ignore_eos=True
                    ),
                    n=1,
                    tenant=sent.tenant.name,
                    band=terms.band,
                    num_uncached=sent.prompt * terms.uncached_share,
                    queue_s=terms.queue_s,
                    num_reserved=terms.reserved,
                )
                submission = self._client.submit([start], Mailbox(), sent.at_s)
                sent.status, sent.service, sent.facts = 200, terms.service, submission.facts[0]
        except AdmissionError as error:
            sent.status = error.status


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accuracy of refusals for a goal."""

    sent: int
    admitted: int
    refused: int
    kept: int  # admitted, with their first token in time
    precision: float  # share of the refused that miss the goal in the run without refusals
    recall: float  # share of the refused among all requests that miss the goal

    @property
    def kept_share(self) -> float:
        """Share of the admitted whose first token came in time."""
        return self.kept / max(self.admitted, 1)


def judge(requests: Sequence[Sent], controls: Sequence[Sent], goal_s: float) -> Verdict:
    """Return the verdict on one tenant's requests; `controls` are the same, in a run without the goal."""
    pairs = list(zip(requests, controls, strict=True))
    admitted = [one for one in requests if one.status == 200]
    refused = [control for one, control in pairs if one.status == 503]
    kept = sum(one.ttft_s <= goal_s for one in admitted)
    right = sum(control.ttft_s > goal_s for control in refused)
    return Verdict(
        len(requests), len(admitted), len(refused), kept, right / max(len(refused), 1),
        right / max(right + len(admitted) - kept, 1),
    )  # fmt: skip


def draw(tenant: Tenant, rate: float, seconds: float, lengths: tuple[int, int], seed: int) -> list[Sent]:
    """Return requests at random times, with lengths of 50 to 150 % of the mean."""
    rng = random.Random(f"{seed}/{tenant.name}")
    requests: list[Sent] = []
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        prompt, outputs = (max(1, round(mean * rng.uniform(0.5, 1.5))) for mean in lengths)
        requests.append(Sent(at_s, tenant, prompt, outputs))
    return requests

"""The sequences of the engine as the HTTP process knows them: their stages, times and counts."""

import enum
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from tiercel.server.client.collector import Mailbox, StreamEnd
from tiercel.server.client.logprobs import PackedLogprobs
from tiercel.values.clock import Clock
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import Finished, FinishReason, FirstToken, PromptReading
from tiercel.values.request import Request, SamplingParams, unpack_tokens
from tiercel.wire.frames import Report


class SequenceStart(Struct, frozen=True, kw_only=True):
    """One sequence to submit."""

    prompt: bytes  # packed tokens
    num_prompt: int
    params: SamplingParams
    n: int | None  # number of choices of its prompt; set on the first of them only
    scope: bytes = b""
    tenant: TenantId = TenantId("default")
    band: int = 0
    num_uncached: float = 0.0  # expected prompt tokens that the prefix cache does not have
    queue_s: float | None = None  # expected wait before its first slice; None = not known
    num_reserved: int = 0  # outputs already charged to the tenant's tokens per minute


class SequenceStage(enum.Enum):
    """The stage of a sequence, by which it is counted."""

    WAITING = "waiting"  # for its first token
    RUNNING = "running"
    GONE = "gone"  # it ended, or its client left


class SequenceFacts:
    """The record of one sequence, kept until the engine reports its end. Written by `OpenSequences`."""

    __slots__ = (
        "abandoned_for",
        "arrival_s",
        "choice",
        "finished",
        "first_token_s",
        "gaps_s",
        "last_token_s",
        "mailbox",
        "num_found",
        "num_resumes",
        "outputs",
        "pooled",
        "prompt_logprobs",
        "stage",
        "start",
        "started_s",
        "suspect_until",
        "tenant",
    )

    def __init__(self, start: SequenceStart, choice: int, mailbox: Mailbox, arrival_s: float) -> None:
        self.start = start
        self.tenant = start.tenant
        self.choice = choice
        self.mailbox: Mailbox | None = mailbox  # None once the client request has ended
        self.abandoned_for: FinishReason | None = None  # why the HTTP process ended it before the engine did
        self.arrival_s = arrival_s
        self.started_s: float | None = None  # launch of its first slice; known with the first token
        self.first_token_s: float | None = None
        self.last_token_s = arrival_s
        self.prompt_logprobs = PackedLogprobs()  # of the prompt's tokens but the first, as far as they are computed
        self.pooled: array[float] | None = None  # the answer to a request with pooling
        self.outputs = array("I")  # tokens that the client has or will get
        self.num_found: int | None = None  # tokens that the cache had at its first slice; known with the first token
        self.num_resumes = 0  # engines that died before it ended
        self.suspect_until = 0  # see `Request`
        self.gaps_s: list[float] = []  # between tokens
        self.finished: Finished | None = None
        self.stage: SequenceStage | None = None  # None until it is submitted

    @property
    def num_outputs(self) -> int:
        """Number of output tokens."""
        return len(self.outputs)

    def add_part(self, part: PromptReading) -> None:
        """Add log-probabilities of the prompt, which arrive in order."""
        tokens = unpack_tokens(self.start.prompt[4 * (part.start + 1) : 4 * (part.end + 1)])
        self.prompt_logprobs.append_part(part, tokens)

    def read_pooled(self) -> "array[float]":
        """Return the answer to a request with pooling, which has ended."""
        assert self.pooled is not None
        return self.pooled

    def request(self, seq: SeqId) -> Request:
        """Return the request for the engine: all of it, or what is left after an engine has died."""
        start = self.start
        return Request(
            id=seq,
            prompt=start.prompt,
            params=start.params,
            arrival_s=self.arrival_s,
            outputs=self.outputs.tobytes(),
            tenant=start.tenant,
            band=start.band,
            scope=start.scope,
            suspect_until=self.suspect_until,
            num_read=len(self.prompt_logprobs),
        )

    def whole(self, finished: Finished, now_s: float) -> Finished:
        """Return the end of a sequence over all engines that computed it. The last one knows its own part only."""
        if not self.num_resumes or self.first_token_s is None or self.started_s is None:
            return finished
        cached = min(self.num_found or 0, self.start.num_prompt)
        return replace(
            finished,
            num_cached=cached,
            num_cached_ssd=min(finished.num_cached_ssd, cached),
            num_cached_ddr=min(finished.num_cached_ddr, max(0, cached - finished.num_cached_ssd)),
            queued_s=self.started_s - self.arrival_s,
            prefill_s=self.first_token_s - self.started_s,
            decode_s=now_s - self.first_token_s,
        )


class SequenceWatcher(Protocol):
    """The counter of what each tenant has at the engine; see `tenancy.usage`."""

    def on_moved(self, facts: SequenceFacts, before: SequenceStage | None) -> None: ...

    def on_finished(self, facts: SequenceFacts) -> None: ...

    def on_prompts(self, tokens: int, busy_s: float) -> None: ...


class SequenceObserver(Protocol):
    """The counter of tokens and ends for `/metrics`."""

    def on_first_token(self, facts: SequenceFacts, now_s: float) -> None: ...

    def on_tokens(self, tenant: TenantId, count: int, gap_s: float) -> None: ...

    def on_finished(self, facts: SequenceFacts, finished: Finished, now_s: float) -> None: ...

    def on_resumed(self, tokens: int, num_found: int) -> None: ...


class OpenSequences:
    """Every sequence that the engine has not reported finished, in order of arrival."""

    def __init__(self, clock: Clock, observer: SequenceObserver, watcher: SequenceWatcher | None) -> None:
        self._clock = clock
        self._observer = observer
        self._watcher = watcher
        self._facts_by_seq: dict[SeqId, SequenceFacts] = {}
        self._tokenless: dict[SeqId, None] = {}
        self._num_started = 0
        self._next_seq = 1

    @property
    def facts_by_seq(self) -> Mapping[SeqId, SequenceFacts]:
        """The records by id, in order of arrival."""
        return self._facts_by_seq

    @property
    def num_open(self) -> int:
        """Number of sequences whose client has not left."""
        return sum(1 for facts in self._facts_by_seq.values() if facts.mailbox is not None)

    @property
    def num_unfinished(self) -> int:
        """Number of sequences that the engine has not reported finished."""
        return len(self._facts_by_seq)

    @property
    def num_tokenless(self) -> int:
        """Number of sequences without a first token."""
        return len(self._tokenless)

    @property
    def num_started(self) -> int:
        """Number of sequences that have had a first token, since start."""
        return self._num_started

    def add(self, start: SequenceStart, choice: int, mailbox: Mailbox, arrival_s: float) -> tuple[SeqId, SequenceFacts]:
        """Record a new sequence and return its id. Its tokens go to `mailbox`."""
        seq = SeqId(self._next_seq)
        self._next_seq += 1
        facts = SequenceFacts(start, choice, mailbox, arrival_s)
        self._facts_by_seq[seq] = facts
        self._tokenless[seq] = None
        self._move(facts, SequenceStage.WAITING)
        return seq, facts

    def take_report(self, report: Report, now_s: float) -> bool:
        """Deliver the tokens, log-probabilities and ends of one step. Return whether a sequence ended.

        Each mailbox is woken once, when everything is in it.
        """
        due: dict[Mailbox, None] = {}  # in order
        self._take_prompts(report)
        self._take_tokens(report, now_s, due)
        for first in report.firsts:
            facts = self._facts_by_seq.get(first.seq)
            if facts is not None:
                self._note_first_slice(facts, first)
        for logprobs in report.logprobs:
            facts = self._facts_by_seq.get(logprobs.seq)
            if facts is not None and facts.mailbox is not None:
                facts.mailbox.put_logprobs(facts.choice, logprobs)
        for finished in report.finished:
            facts = self._note_finished(finished, now_s)
            if facts is not None and facts.mailbox is not None and facts.finished is not None:
                facts.mailbox.put_finished(facts.choice, facts.finished)
                due[facts.mailbox] = None
        for mailbox in due:
            mailbox.wake()
        return bool(report.finished)

    def _take_prompts(self, report: Report) -> None:
        """Keep what was read of prompts. It comes before the first token of its sequence, or before its end."""
        for part in report.prompts:
            facts = self._facts_by_seq.get(part.seq)
            if facts is not None and facts.mailbox is not None:
                facts.add_part(part)
        for pooled in report.pooled:
            facts = self._facts_by_seq.get(pooled.seq)
            if facts is not None:
                facts.pooled = array("f", pooled.vector)

    def _take_tokens(self, report: Report, now_s: float, due: dict[Mailbox, None]) -> None:
        """Put the tokens of a step into mailboxes; count them by tenant and by the time of the token before."""
        facts_by_seq = self._facts_by_seq
        ending = {finished.seq for finished in report.finished}
        counts: dict[tuple[TenantId, float], int] = {}
        for seq, token in zip(memoryview(report.seqs).cast("Q"), memoryview(report.tokens).cast("I"), strict=False):
            facts = facts_by_seq.get(SeqId(seq))
            if facts is None or facts.mailbox is None:
                continue  # a token launched before the engine received the abort
            if facts.first_token_s is None:
                self._note_first_token(SeqId(seq), facts, now_s)
            else:
                facts.gaps_s.append(now_s - facts.last_token_s)
                group = facts.tenant, facts.last_token_s
                counts[group] = counts.get(group, 0) + 1
            facts.last_token_s = now_s
            facts.outputs.append(token)
            if facts.mailbox.put_token(facts.choice, token, is_last=seq in ending):
                due[facts.mailbox] = None
        for (tenant, before_s), count in counts.items():
            self._observer.on_tokens(tenant, count, now_s - before_s)

    def note_prompts(self, tokens: int, busy_s: float) -> None:
        """Tell the watcher how many prompt tokens a step computed, if sequences wait for their first token."""
        if self._watcher is not None and self._tokenless:
            self._watcher.on_prompts(max(tokens, 0), busy_s)

    def abandon(self, seqs: Sequence[SeqId], reason: FinishReason) -> tuple[SeqId, ...]:
        """Deliver nothing more of these sequences. Return those that were still open.

        If no engine reports their ends, they are counted with `reason`.
        """
        abandoned: list[SeqId] = []
        for seq in seqs:
            facts = self._facts_by_seq.get(seq)
            if facts is not None and facts.mailbox is not None:
                facts.mailbox = None
                facts.abandoned_for = reason
                self._tokenless.pop(seq, None)
                self._move(facts, SequenceStage.GONE)
                abandoned.append(seq)
        return tuple(abandoned)

    def youngest_tokenless(self, count: int) -> list[SeqId]:
        """Return the `count` youngest sequences without a first token; all of them if there are fewer."""
        seqs = list(self._tokenless)
        return seqs[max(len(seqs) - count, 0) :]

    def end_streams(self, seqs: Sequence[SeqId], end: StreamEnd) -> None:
        """End the streams of these sequences with a reason."""
        for seq in seqs:
            mailbox = self._facts_by_seq[seq].mailbox
            if mailbox is not None:
                mailbox.put_end(end)
                mailbox.wake()

    def resume(self, seqs: Iterable[SeqId] | None = None) -> list[Request]:
        """Return what a new engine has to compute, in order of arrival. What no client waits for ends here.

        `seqs`: those that have no engine, in order of arrival; None: all.
        """
        now_s = self._clock.now_s()
        requests: list[Request] = []
        for seq in list(self._facts_by_seq if seqs is None else seqs):
            facts = self._facts_by_seq[seq]
            if facts.mailbox is None:
                self._note_finished(_ended(seq, facts, now_s), now_s)
            else:
                requests.append(facts.request(seq))
        return requests

    def note_death(self, suspects: Mapping[SeqId, int], seqs: Iterable[SeqId] | None = None) -> None:
        """Note that an engine has died, perhaps because of a sequence among `suspects` (see `Request`).

        `seqs`: the sequences that it had; None: all.
        """
        for seq in list(self._facts_by_seq if seqs is None else seqs):
            facts = self._facts_by_seq.get(seq)
            if facts is None:
                continue
            facts.num_resumes += 1
            facts.suspect_until = max(facts.suspect_until, suspects.get(seq, 0))
            if seq in suspects and facts.num_found is None:
                facts.num_found = 0  # the next engine would find what this one has computed

    def fail(self, seq: SeqId, end: StreamEnd) -> None:
        """End one sequence as failed, and with it the stream of its request."""
        facts, now_s = self._facts_by_seq.get(seq), self._clock.now_s()
        if facts is None:
            return
        mailbox, facts.mailbox = facts.mailbox, None
        self._note_finished(_ended(seq, facts, now_s), now_s)
        if mailbox is not None:
            mailbox.put_end(end)
            mailbox.wake()

    def fail_all(self, end: StreamEnd) -> None:
        """End every sequence as failed: the engine that would report its end has died."""
        now_s = self._clock.now_s()
        due: dict[Mailbox, None] = {}
        for seq, facts in list(self._facts_by_seq.items()):
            if facts.mailbox is not None:
                facts.mailbox.put_end(end)
                due[facts.mailbox] = None
                facts.mailbox = None
            self._note_finished(_ended(seq, facts, now_s), now_s)
        for mailbox in due:
            mailbox.wake()

    def _note_first_slice(self, facts: SequenceFacts, first: FirstToken) -> None:
        """Record what an engine reports with the first token that it has computed of a sequence."""
        if facts.num_resumes:
            facts.suspect_until = 0  # it has passed the step in which an engine died
            self._observer.on_resumed(facts.start.num_prompt + facts.num_outputs - 1, first.num_found)
        if facts.started_s is None:
            facts.started_s = first.started_s
            if facts.num_found is None:
                facts.num_found = first.num_found

    def _note_first_token(self, seq: SeqId, facts: SequenceFacts, now_s: float) -> None:
        facts.first_token_s = now_s
        self._tokenless.pop(seq, None)
        self._num_started += 1
        self._move(facts, SequenceStage.RUNNING)
        self._observer.on_first_token(facts, now_s)

    def _note_finished(self, finished: Finished, now_s: float) -> SequenceFacts | None:
        """Record the end of a sequence and return its record, or None if the sequence is not known."""
        facts = self._facts_by_seq.pop(finished.seq, None)
        if facts is None:
            return None
        self._tokenless.pop(finished.seq, None)
        facts.finished = finished = facts.whole(finished, now_s)
        self._move(facts, SequenceStage.GONE)
        if self._watcher is not None:
            self._watcher.on_finished(facts)
        self._observer.on_finished(facts, finished, now_s)
        return facts

    def _move(self, facts: SequenceFacts, stage: SequenceStage) -> None:
        before = facts.stage
        if before is not stage:
            facts.stage = stage
            if self._watcher is not None:
                self._watcher.on_moved(facts, before)


def _ended(seq: SeqId, facts: SequenceFacts, now_s: float) -> Finished:
    """Return the end of a sequence that no engine reports: as it was abandoned, else as failed with its engine."""
    reason = facts.abandoned_for or FinishReason.ERROR
    started_s = now_s if facts.started_s is None else facts.started_s
    first_s = now_s if facts.first_token_s is None else facts.first_token_s
    return Finished(
        seq=seq,
        reason=reason,
        num_prompt=facts.start.num_prompt,
        num_outputs=facts.num_outputs,
        num_cached=0,
        queued_s=started_s - facts.arrival_s,
        prefill_s=first_s - started_s,
        decode_s=now_s - first_s,
        error="engine died" if reason is FinishReason.ERROR else None,
    )

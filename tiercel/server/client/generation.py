"""The generation of one client request: tokens of its sequences become text, and each choice ends exactly once."""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from msgspec import Struct

from tiercel.server.client.alarm import Alarm
from tiercel.server.client.choice_text import ChoiceDelta, ChoiceText, GenerationError
from tiercel.server.client.client import EngineClient, Submission
from tiercel.server.client.collector import Delivery, Mailbox, StreamEnd
from tiercel.server.client.sequences import SequenceFacts
from tiercel.values.clock import Clock
from tiercel.values.ids import SeqId
from tiercel.values.outcome import Finished, FinishReason

_SETTLE_S = 0.25
_TIMED_TOKENS = 16


class DetokenizeTimes:
    """The times at which tokens of a generation became text, and the time that this took."""

    __slots__ = ("busy_s", "count", "first_s", "last_s")

    def __init__(self) -> None:
        self.first_s = 0.0
        self.last_s = 0.0
        self.busy_s = 0.0
        self.count = 0  # of intervals; one interval may cover several tokens

    def note(self, start_s: float, end_s: float, weight: int = 1) -> None:
        """Add an interval of work, which stands for `weight` equal ones."""
        if self.count == 0:
            self.first_s = start_s
        self.last_s = end_s
        self.busy_s += weight * (end_s - start_s)
        self.count += weight


class TokenText:
    """Turns single tokens of one choice into text, without a delta for each."""

    __slots__ = ("_choice", "_clock", "_num_tokens", "_times")

    def __init__(self, choice: ChoiceText, times: DetokenizeTimes, clock: Clock) -> None:
        self._choice = choice
        self._times = times
        self._clock = clock
        self._num_tokens = 0

    def advance(self, token: int) -> str:
        """Return the text that is complete with this token. The time of every 16th token counts for 16."""
        self._num_tokens += 1
        if self._num_tokens % _TIMED_TOKENS:
            return self._choice.advance_token(token)
        start_s = self._clock.now_s()
        text = self._choice.advance_token(token)
        self._times.note(start_s, self._clock.now_s(), _TIMED_TOKENS)
        return text


class TokenUsage(Struct, frozen=True):
    """The token counts of a client request so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class StreamEndedError(GenerationError):
    """The engine died, the server is shutting down, or the time is up."""

    def __init__(self, end: StreamEnd) -> None:
        super().__init__(end.code)
        self.end = end


class Generation:
    """The sequences of one client request. Leaving the `with` aborts the sequences that still run."""

    __slots__ = (
        *("_alarms", "_choices", "_client", "_clock", "_num_open", "_num_prompt", "_queue_end", "_submission"),
        *("detokenizing", "mailbox"),
    )

    def __init__(
        self,
        client: EngineClient,
        submission: Submission,
        mailbox: Mailbox,
        choices: Sequence[ChoiceText],
        num_prompt: int,
        clock: Clock,
    ) -> None:
        self._client = client
        self._clock = clock
        self._submission = submission
        self._choices = tuple(choices)
        self._num_prompt = num_prompt  # tokens of all prompts
        self._num_open = len(choices)  # choices without a finish reason
        self._alarms: list[Alarm] = []
        self._queue_end: StreamEnd | None = None  # once its time in the queue is up
        self.mailbox = mailbox
        self.detokenizing = DetokenizeTimes()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for alarm in self._alarms:
            alarm.cancel()
        self._client.abort(self._submission.seqs, FinishReason.ABORT)

    @property
    def num_choices(self) -> int:
        """Number of choices of all prompts together."""
        return len(self._choices)

    @property
    def facts(self) -> Sequence[SequenceFacts]:
        """The records of the sequences, in the order of the choices."""
        return self._submission.facts

    @property
    def finish_reasons(self) -> Sequence[str]:
        """The distinct finish reasons of the choices that are done, sorted."""
        return sorted({choice.finish_reason for choice in self._choices if choice.finish_reason is not None})

    @property
    def is_done(self) -> bool:
        """True when every choice has its finish reason."""
        return not self._num_open

    @property
    def has_tokens(self) -> bool:
        """True when a choice has had its first token."""
        return any(facts.num_outputs for facts in self._submission.facts)

    def call_at(self, at_s: float, action: Callable[[], None]) -> None:
        """Call `action` at a time of the clock, unless the generation has ended before."""
        alarm = Alarm(self._clock, at_s, action)
        self._alarms.append(alarm)
        alarm.set()

    def expire(self, end: StreamEnd, *, keeps_text: bool = True) -> None:
        """End the sequences now, because the time is up.

        Open choices keep their text and get the finish reason "timeout". If no choice has a token, or the text is not
        to be kept, the generation ends with `end` as an error.
        """
        facts, had_tokens = self._submission.facts, self.has_tokens
        ended = [choice for choice in range(len(facts)) if facts[choice].finished is None]
        self._client.abort([self._submission.seqs[choice] for choice in ended], FinishReason.TIMEOUT)
        if not had_tokens or not keeps_text:
            self.mailbox.put_end(end)
        else:
            for choice in ended:
                self.mailbox.put_finished(choice, _timed_out(self._submission.seqs[choice], facts[choice]))
        self.mailbox.wake()

    def expire_queued(self, end: StreamEnd) -> None:
        """End the sequences with `end` as an error if none has been admitted, because their time in the queue is up."""
        if self.has_tokens:
            return
        self._queue_end = end
        if self._client.abort_queued(self._submission.seqs, FinishReason.TIMEOUT):
            self.mailbox.put_end(end)
            self.mailbox.wake()

    async def next_deltas(self) -> list[ChoiceDelta]:
        """Wait for tokens and turn them into text. The list is empty if all text is held back.

        Errors: GenerationError.
        """
        return self.deltas_of(await self.mailbox.take())

    def token_text(self) -> "TokenText | None":
        """Return what turns single tokens into text, or None if the deltas of this generation may be more than text.

        They are if it has several choices, stop strings or log-probabilities.
        """
        choice, params = self._choices[0], self.facts[0].start.params
        if len(self._choices) > 1 or params.logprobs is not None or not choice.takes_single_tokens:
            return None
        return TokenText(choice, self.detokenizing, self._clock)

    async def flow(self, take: Callable[[list[ChoiceDelta]], bool]) -> None:
        """Call `take` with the new deltas at each report, as part of its handling: no task has to be woken for that.

        Returns when every choice is done or `take` has returned False. Errors: GenerationError, and those of `take`.
        """
        flow = _Flow(self, take)
        with self.mailbox.read_by(flow.read):
            flow.read()
            await flow.ended

    def deltas_of(self, deliveries: Sequence[Delivery] | StreamEnd) -> list[ChoiceDelta]:
        """Turn what was read from the mailbox into text. Errors: GenerationError."""
        if isinstance(deliveries, StreamEnd):
            raise StreamEndedError(deliveries)
        if not deliveries:
            return []
        start_s = self._clock.now_s()
        deltas: list[ChoiceDelta] = []
        for delivery in deliveries:
            choice = self._choices[delivery.choice]
            if self._queue_end is not None and _is_timeout(delivery) and not self.has_tokens:
                raise StreamEndedError(self._queue_end)
            delta = choice.advance(delivery)
            if delta is None:
                continue
            deltas.append(delta)
            if delta.finish_reason is not None:
                self._num_open -= 1
                if choice.stopped_by_text:
                    self._client.abort((self._submission.seqs[delivery.choice],), FinishReason.STOP)
        self.detokenizing.note(start_s, self._clock.now_s())
        return deltas

    async def settle(self, patience_s: float = _SETTLE_S) -> None:
        """Wait for the engine to report sequences that were ended from here: only it knows the cached tokens."""
        try:
            async with asyncio.timeout(patience_s):
                await self._client.wait_finished(self._submission.facts)
        except TimeoutError:
            return

    def usage(self) -> TokenUsage:
        """Return the token counts so far; cached tokens are known of finished sequences only."""
        firsts = (facts.finished for facts in self._submission.facts if facts.start.n is not None)
        return TokenUsage(
            self._num_prompt,
            sum(choice.num_outputs for choice in self._choices),
            sum(finished.num_cached for finished in firsts if finished is not None),
        )


def _is_timeout(delivery: Delivery) -> bool:
    return delivery.finished is not None and delivery.finished.reason is FinishReason.TIMEOUT


def _timed_out(seq: SeqId, facts: SequenceFacts) -> Finished:
    """Return the end of a sequence for its reader; the engine reports the times later."""
    return Finished(
        seq=seq,
        reason=FinishReason.TIMEOUT,
        num_prompt=facts.start.num_prompt,
        num_outputs=facts.num_outputs,
        num_cached=0,
    )


class _Flow:
    """Hands the deltas of each report on while the report is handled."""

    __slots__ = ("_generation", "_take", "ended")

    def __init__(self, generation: Generation, take: Callable[[list[ChoiceDelta]], bool]) -> None:
        self._generation = generation
        self._take = take
        self.ended = asyncio.get_running_loop().create_future()

    def read(self) -> None:
        """Read the mailbox, portion by portion, until it is empty or the deltas are not taken."""
        if self.ended.done():
            return
        generation, mailbox = self._generation, self._generation.mailbox
        try:
            goes_on = self._take(generation.deltas_of(mailbox.read()))
            while goes_on and mailbox.has_news and not generation.is_done:
                goes_on = self._take(generation.deltas_of(mailbox.read()))
        except Exception as exc:  # an error here concerns this request alone, not the others of the report
            self.ended.set_exception(exc)
            return
        if not goes_on or generation.is_done:
            self.ended.set_result(None)

"""The whole answer of a generation that is not streamed."""

from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence

import msgspec
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tiercel.server.api.delta_encoder import ReplyShape
from tiercel.server.api.hold import Hold
from tiercel.server.api.replies.hole import HOLE
from tiercel.server.api.replies.usage import UsageBody, usage_body
from tiercel.server.api.stream import FailureNote, StreamRules, to_refusal
from tiercel.server.client.choice_text import ChoiceDelta, GenerationError
from tiercel.server.client.generation import Generation
from tiercel.server.client.logprobs import DrawnTokens, PackedLogprobs
from tiercel.server.http.pieces import patient_sender, send_pieces
from tiercel.server.http.watch import run_watched
from tiercel.server.text.vocabulary import Vocabulary


class _WholeChoice:
    """The text and the log-probabilities of one choice, collected in little memory."""

    __slots__ = ("_last", "_logprobs", "_text", "_tokens")

    def __init__(self) -> None:
        self._text = bytearray()
        self._logprobs = PackedLogprobs()
        self._tokens = array("I")
        self._last: ChoiceDelta | None = None

    def add(self, delta: ChoiceDelta) -> None:
        """Add the next delta."""
        self._text += delta.text.encode()
        self._logprobs.extend(delta.logprobs.packed)
        self._tokens.extend(delta.tokens)
        self._last = delta

    def whole(self, vocabulary: Vocabulary) -> ChoiceDelta:
        """Return all deltas as one."""
        last = self._last
        assert last is not None  # a choice ends with a delta
        return ChoiceDelta(
            choice=last.choice,
            text=self._text.decode(),
            logprobs=DrawnTokens(self._logprobs, vocabulary),
            num_outputs=last.num_outputs,
            tokens=self._tokens,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            num_hidden=last.num_hidden,
        )


class WholeReply(Response):
    """A response that waits for the end of the generation, and aborts it if the client leaves.

    Log-probabilities are kept as arrays and encoded while the answer is sent, piece by piece; `room` is released when
    that is done.
    """

    def __init__(
        self,
        generation: Generation,
        shape: ReplyShape,
        rules: StreamRules,
        note: FailureNote,
        vocabulary: Vocabulary,
        room: Hold,
        kept: int | None = None,
        best_of: int = 1,
        in_worker: "Callable[[Callable[[], list[bytes]]], Awaitable[list[bytes]]] | None" = None,
    ) -> None:
        """`kept`: of `best_of` choices of each prompt only the best are returned; None = all.

        `in_worker` makes the body, if that takes more than encoding it.
        """
        super().__init__(media_type="application/json")
        self._generation = generation
        self._shape = shape
        self._rules = rules
        self._note = note
        self._vocabulary = vocabulary
        self._room = room
        self._kept = kept
        self._best_of = best_of
        self._in_worker = in_worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        patient = patient_sender(scope, send, self._rules.patience_s)
        with self._room:
            with self._generation as generation:
                choices, usage = await run_watched(self._collect(generation), receive)
            body = await self._body(choices, usage)
            if scope["http_version"] == "1.0":  # which has no chunks
                body = [b"".join(self._pieces(body, choices))]
            length = len(body[0]) if len(body) == 1 else None
            await run_watched(send_pieces(patient, self._pieces(body, choices), length), receive)

    async def _body(self, choices: list[ChoiceDelta], usage: UsageBody) -> list[bytes]:
        """Return the parts of the body between its holes."""

        def make() -> list[bytes]:
            return msgspec.json.encode(self._shape.reply(choices, usage)).split(HOLE)

        return make() if self._in_worker is None else await self._in_worker(make)

    async def _collect(self, generation: Generation) -> tuple[list[ChoiceDelta], UsageBody]:
        parts: dict[int, _WholeChoice] = {}

        def take(deltas: list[ChoiceDelta]) -> bool:
            for delta in deltas:
                if (part := parts.get(delta.choice)) is None:
                    part = parts[delta.choice] = _WholeChoice()
                part.add(delta)
            return True

        try:
            await generation.flow(take)
        except GenerationError as exc:
            raise to_refusal(exc, self._note) from exc
        await generation.settle()
        usage = usage_body(generation.usage(), with_details=self._rules.with_details)
        choices = [parts[choice].whole(self._vocabulary) for choice in range(generation.num_choices)]
        return choices if self._kept is None else best_choices(choices, self._best_of, self._kept), usage

    def _pieces(self, body: list[bytes], choices: list[ChoiceDelta]) -> Iterator[bytes]:
        """Yield the body, and in each hole its log-probabilities, which are encoded one by one."""
        first, *others = body
        yield first
        holes = self._shape.hole_pieces(choices) if others else iter(())
        for pieces, other in zip(holes, others, strict=True):
            yield from pieces
            yield other


def best_choices(choices: Sequence[ChoiceDelta], best_of: int, kept: int) -> list[ChoiceDelta]:
    """Return for each prompt the `kept` of its `best_of` choices with the highest mean log-probability, best first."""
    best: list[ChoiceDelta] = []
    for first in range(0, len(choices), best_of):
        of_prompt = sorted(choices[first : first + best_of], key=lambda choice: -_mean_logprob(choice))
        best += of_prompt[:kept]
    return [replace(choice, choice=index) for index, choice in enumerate(best)]


def _mean_logprob(choice: ChoiceDelta) -> float:
    """Return the mean of the tokens with text, so that the order does not depend on whether ids are returned."""
    return choice.logprobs.packed.mean(len(choice.logprobs) - choice.num_hidden)

"""The text of one choice: tokens become text, stop strings are found, and the text is cut into chunks."""

from array import array
from collections.abc import Sequence

from msgspec import Struct

from tiercel.server.client.collector import Delivery
from tiercel.server.client.logprobs import DrawnTokens, PackedLogprobs
from tiercel.server.text.answer.event import COMPLETE, CUT, Ending
from tiercel.server.text.detokenizer import ByteDetokenizer, Detokenizer
from tiercel.server.text.stop import StopScanner, TextRules
from tiercel.server.text.vocabulary import Vocabulary
from tiercel.values.grammar import GRAMMAR_FAILED, NOTHING_LEFT
from tiercel.values.outcome import Finished, FinishReason

_END_OF_TEXT = 2**32 - 1  # for a token without text: it begins where the text ends


class ChoiceDelta(Struct, frozen=True, kw_only=True):
    """New text of one choice."""

    choice: int
    text: str
    logprobs: DrawnTokens
    num_outputs: int  # tokens since the start of the choice
    tokens: Sequence[int] = ()  # the new tokens, if the client asked for them; a hidden stop token is among them
    finish_reason: str | None = None  # stop | length | timeout
    stop_reason: int | str | None = None
    num_hidden: int = 0  # the last of `logprobs` that belong to no text: that of a hidden stop token

    @property
    def ending(self) -> Ending | None:
        """The way in which the text of the choice ended; None if it has not."""
        match self.finish_reason, self.stop_reason:
            case None, _:
                return None
            case "stop", None:
                return COMPLETE
            case "stop", reason:
                return Ending(is_cut=True, following=reason if isinstance(reason, str) else "")
            case _:
                return CUT


class GenerationError(Exception):
    """Base of the errors that end a generation early."""


class SequenceFailedError(GenerationError):
    """The engine failed one sequence of the request. `reason` is for the log only, unless the request is to blame."""

    def __init__(self, reason: str) -> None:
        super().__init__("sequence failed")
        self.reason = reason

    @property
    def is_of_request(self) -> bool:
        """Whether the request is to blame: its fields contradict each other, or its grammar exceeds a limit."""
        return self.reason.startswith((GRAMMAR_FAILED, NOTHING_LEFT))


class ChoiceText:
    """The text of one sequence: detokenised, scanned for stop strings and cut into chunks."""

    __slots__ = (
        *(
            "_detokenizer",
            "_holds_nothing",
            "_interval_tokens",
            "_logprobs",
            "_no_logprobs",
            "_num_hidden",
            "_num_sure",
            "_num_unsent",
            "_rules",
            "_scanner",
            "_sent_text",
            "_shown_outputs",
        ),
        *(
            "_stop_token_ids",
            "_text",
            "_text_end",
            "_tokens",
            "_vocabulary",
            "finish_reason",
            "num_outputs",
            "stopped_by_text",
        ),
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        rules: TextRules,
        vocabulary: Vocabulary,
        stop_token_ids: Sequence[int],
        interval_tokens: int,
        *,
        returns_tokens: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(rules.stops, include_stop=rules.include_stop)
        self._rules = rules
        self._vocabulary = vocabulary
        self._stop_token_ids = frozenset(stop_token_ids)
        self._interval_tokens = interval_tokens
        # Complete text is shown at once, and nothing but text.
        self._holds_nothing = not rules.stops and interval_tokens <= 1 and not returns_tokens
        self._tokens: array[int] | None = array("I") if returns_tokens else None  # not shown yet
        self._text = ""
        self._sent_text = 0  # characters
        self._text_end = 0  # characters that the tokens have become, including those that the scanner holds back
        self._num_hidden = 0
        self._num_unsent = 0  # tokens
        self._num_sure = 0  # the first of these, up to the last one behind which the scanner held nothing back
        self._logprobs = PackedLogprobs()
        self._no_logprobs = DrawnTokens(PackedLogprobs(), vocabulary)
        self._shown_outputs = 0
        self.num_outputs = 0
        self.finish_reason: str | None = None
        self.stopped_by_text = False

    @property
    def is_done(self) -> bool:
        """True when the finish reason is known."""
        return self.finish_reason is not None

    def advance(self, delivery: Delivery) -> ChoiceDelta | None:
        """Add a delivery. Return a delta if there is text to send or the choice has ended, otherwise None.

        Errors: SequenceFailedError.
        """
        if self.finish_reason is not None:
            return None
        finished = delivery.finished
        if finished is None and self._holds_nothing and not delivery.logprobs:
            return self._advance_text(delivery)
        shown = delivery.tokens
        has_stop_token = finished is not None and finished.stop_token is not None and len(shown) > 0
        is_hidden = has_stop_token and not self._rules.include_stop
        if is_hidden:
            shown = shown[:-1]
        found = self._take(shown, delivery.logprobs)
        if found is not None:
            self.stopped_by_text = True
            return self._delta(delivery.choice, "stop", found)
        if finished is not None:
            if is_hidden:
                self._take_hidden(delivery)
            return self._end(delivery.choice, finished)
        since_shown = self.num_outputs - self._shown_outputs
        is_due = self._shown_outputs == 0 or since_shown >= self._interval_tokens
        if is_due and (self._text or self._has_sure_entries or self._shown_outputs == 0):
            return self._delta(delivery.choice, None, None)
        return None

    @property
    def takes_single_tokens(self) -> bool:
        """True if `advance_token` may be used: text is shown as soon as it is complete, and tokens are byte strings."""
        return self._holds_nothing and isinstance(self._detokenizer, ByteDetokenizer)

    def advance_token(self, token: int) -> str:
        """Add a token that is neither the first nor the last, without log-probabilities. Return the new text."""
        self.num_outputs += 1
        self._shown_outputs = self.num_outputs
        return self._detokenizer.feed((token,))

    def _advance_text(self, delivery: Delivery) -> ChoiceDelta | None:
        """Do what `advance` does if there is no end, no stop string and no log-probability: for most tokens."""
        text = self._detokenizer.feed(delivery.tokens)
        self.num_outputs += len(delivery.tokens)
        if not text and self._shown_outputs:
            return None
        self._shown_outputs = self.num_outputs
        return ChoiceDelta(choice=delivery.choice, text=text, logprobs=self._no_logprobs, num_outputs=self.num_outputs)

    def _take(self, tokens: Sequence[int], logprobs: PackedLogprobs) -> str | None:
        """Append the text of the tokens. Return the stop string found in it, or None."""
        if not self._rules.stops and not logprobs:
            self._text += self._detokenizer.feed(tokens)
            if self._tokens is not None:
                self._tokens.extend(tokens)
            self.num_outputs += len(tokens)
            self._num_unsent += len(tokens)
            self._num_sure = self._num_unsent
            return None
        for index, token in enumerate(tokens):
            self.num_outputs += 1
            self._num_unsent += 1
            self._keep(token, logprobs, index, self._text_end)
            text = self._detokenizer.feed((token,))
            self._text_end += len(text)
            step = self._scanner.feed(text, may_stop=self.num_outputs > self._rules.min_tokens)
            self._text += step.text
            if step.found is not None:
                return step.found
            if not self._scanner.is_holding:
                self._num_sure = self._num_unsent
        return None

    def _take_hidden(self, delivery: Delivery) -> None:
        """Take the stop token at the end, which has no text.

        Its log-probability belongs to the answer only where the answer has its id: the lists are then equally long.
        """
        self.num_outputs += 1
        if self._tokens is not None:
            self._num_hidden = 1
            self._keep(delivery.tokens[-1], delivery.logprobs, len(delivery.tokens) - 1, _END_OF_TEXT)

    def _keep(self, token: int, logprobs: PackedLogprobs, index: int, text_start: int) -> None:
        """Keep the id and the log-probability of a token until they are sent, as far as the client asked for them."""
        if self._tokens is not None:
            self._tokens.append(token)
        if index < len(logprobs):
            self._logprobs.extend(logprobs, index, index + 1)
            self._logprobs.text_starts[-1] = text_start

    @property
    def _has_sure_entries(self) -> bool:
        return self._num_sure > 0 and bool(self._logprobs or self._tokens)

    def _end(self, choice: int, finished: Finished) -> ChoiceDelta:
        if finished.reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise SequenceFailedError(finished.error or finished.reason.value)
        rest = self._scanner.feed(self._detokenizer.flush(), may_stop=self.num_outputs > self._rules.min_tokens)
        self._text += rest.text
        if rest.found is not None:
            return self._delta(choice, "stop", rest.found)
        self._text += self._scanner.flush()
        is_requested = finished.stop_token in self._stop_token_ids
        return self._delta(choice, finished.reason.value, finished.stop_token if is_requested else None)

    def _delta(self, choice: int, finish_reason: str | None, stop_reason: int | str | None) -> ChoiceDelta:
        """Return what may be shown: the text, and the tokens of which no text is held back, or at the end all."""
        logprobs, tokens = self._logprobs, self._tokens
        self._sent_text += len(self._text)
        if finish_reason is not None:
            logprobs.cut_text(self._sent_text)
            self._logprobs, self._tokens = PackedLogprobs(), array("I")
        else:
            logprobs, tokens = self._sure_entries()
        delta = ChoiceDelta(
            choice=choice,
            text=self._text,
            logprobs=DrawnTokens(logprobs, self._vocabulary),
            num_outputs=self.num_outputs,
            tokens=tokens or (),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_hidden=self._num_hidden,
        )
        self.finish_reason = finish_reason
        self._text, self._shown_outputs = "", self.num_outputs
        return delta

    def _sure_entries(self) -> tuple[PackedLogprobs, "array[int] | None"]:
        """Take the log-probabilities and the ids of the tokens that may be sent."""
        count, logprobs, tokens = self._num_sure, self._logprobs, self._tokens
        self._num_unsent -= count
        self._num_sure = 0
        if not self._num_unsent:  # in most cases
            self._logprobs, self._tokens = PackedLogprobs(), None if tokens is None else array("I")
            return logprobs, tokens
        sure, self._logprobs = PackedLogprobs(), PackedLogprobs()
        sure.extend(logprobs, 0, count)
        self._logprobs.extend(logprobs, count)
        if tokens is not None:
            tokens, self._tokens = tokens[:count], tokens[count:]
        return sure, tokens

"""Prompt lookup: proposes the next tokens of a sequence from its own earlier text.

Where the last tokens of a sequence occur earlier in it, the tokens behind that place are proposed. They are checked by
the step that computes them, so the text never changes. Source: prompt lookup decoding
(https://github.com/apoorvumang/prompt-lookup-decoding), `prompt_lookup_num_tokens` in transformers.
"""

from array import array
from collections.abc import Callable, Collection

from tiercel.scheduler.cost import StepCosts
from tiercel.scheduler.draft import Draft
from tiercel.scheduler.sequence import SequenceProgress
from tiercel.values.ids import SeqId

_LONGEST, _SHORTEST = 4, 2  # tokens that must occur earlier
_WINDOW = 32_768  # tokens that are searched, the last ones: about 0.1 ms
_MAX_DECODES = 64  # beside more decodes no proposal can pay, and the search would delay them all
_FIRST_RATE = 0.6
_WEIGHT = 0.1  # of the newest guess in the rate
_ITEM = array("I").itemsize

Finder = Callable[["array[int]", int, int], tuple[int, ...]]
"""Returns tokens that may follow a sequence: see `continuation`."""


class _Guesses:
    """The guesses for one sequence: the part that was right, and the next token, until it is known."""

    __slots__ = ("position", "rate", "token")

    def __init__(self) -> None:
        self.rate = _FIRST_RATE
        self.position: int | None = None  # in the sequence
        self.token = 0

    def compare(self, tokens: "array[int]") -> None:
        """Move the rate by the last guess, if its token is known now."""
        if self.position is not None and self.position < len(tokens):
            self.rate += _WEIGHT * ((tokens[self.position] == self.token) - self.rate)
            self.position = None


def continuation(tokens: "array[int]", skip: int, count: int) -> tuple[int, ...]:
    """Return `count` tokens that may follow `skip` unknown tokens behind these; nothing if their end is new.

    The latest earlier occurrence of the longest possible end counts. If it reaches up to the end itself, the text is
    taken as periodic.
    """
    start = max(0, len(tokens) - _WINDOW)
    text = tokens[start:].tobytes()
    for length in range(_LONGEST, _SHORTEST - 1, -1):
        at = _rfind(text, length)
        if at is not None:
            follows = list(text_tokens(text, at + length))
            period = len(text) // _ITEM - at - length
            while len(follows) < skip + count:
                follows.append(follows[-period])
            return tuple(follows[skip : skip + count])
    return ()


def text_tokens(text: bytes, start: int) -> "array[int]":
    """Return the tokens of raw text from an index on."""
    tokens = array("I")
    tokens.frombytes(text[start * _ITEM :])
    return tokens


def _rfind(text: bytes, length: int) -> int | None:
    """Return the index of the latest earlier occurrence of the last `length` tokens; None if there is none."""
    if len(text) < (length + 1) * _ITEM:
        return None
    end = text[-length * _ITEM :]
    at = text.rfind(end, 0, len(text) - _ITEM)
    while at >= 0 and at % _ITEM:  # between two tokens
        at = text.rfind(end, 0, at + len(end) - 1)
    return at // _ITEM if at >= 0 else None


class PromptLookup:
    """Adds proposed tokens to the decodes of a step if they are expected to pay.

    The guesses of each sequence are compared with its text even while nothing is proposed. A step gets proposals if
    its tokens, those that are expected to be right included, take no more time each than without proposals.
    """

    def __init__(self, find: Finder = continuation) -> None:
        self._find = find
        self._guesses_by_seq: dict[SeqId, _Guesses] = {}

    def add_to(self, draft: Draft, decoding: Collection[SequenceProgress], costs: StepCosts) -> None:
        """Add proposals to the slices of these sequences; to none if the step has no tokens left or they do not pay."""
        if len(decoding) > _MAX_DECODES:
            return
        proposals: list[tuple[SequenceProgress, tuple[int, ...]]] = []
        gain = 0.0
        for one in decoding:
            if one.lookup_tokens and (tokens := self._proposal(one)):
                proposals.append((one, tokens))
                gain += _expected(self._guesses_by_seq[one.id].rate, len(tokens))
        self._forget(decoding)
        extra = sum(len(tokens) for _, tokens in proposals)
        if not extra or extra > draft.tokens_left:
            return
        context = sum(one.scheduled for one in decoding)
        alone_ms = costs.step_ms(0, 0, len(decoding), context)
        mean = sum(one.scheduled * len(tokens) for one, tokens in proposals) / extra
        if costs.step_ms(extra, mean, len(decoding), context) * len(decoding) > alone_ms * (len(decoding) + gain):
            return
        for one, tokens in proposals:
            if _has_room(draft, one, len(tokens)):
                draft.propose(one.id, tokens)

    def _proposal(self, sequence: SequenceProgress) -> tuple[int, ...]:
        """Return the proposal for a sequence, and compare the guess before with what came."""
        guesses = self._guesses_by_seq.setdefault(sequence.id, _Guesses())
        guesses.compare(sequence.tokens)
        most = min(sequence.lookup_tokens, sequence.limit - sequence.num_tokens - 1)
        found = self._find(sequence.tokens, sequence.pending, most) if most > 0 else ()
        if found and guesses.position is None:
            guesses.position, guesses.token = sequence.num_tokens, found[0]
        return found

    def _forget(self, decoding: Collection[SequenceProgress]) -> None:
        """Forget sequences that do not decode any more."""
        if len(self._guesses_by_seq) > 2 * _MAX_DECODES:
            known = {one.id for one in decoding}
            self._guesses_by_seq = {seq: one for seq, one in self._guesses_by_seq.items() if seq in known}


def _expected(rate: float, count: int) -> float:
    """Return how many of `count` proposed tokens are expected to be right before the first wrong one."""
    return sum(rate**number for number in range(1, count + 1))


def _has_room(draft: Draft, sequence: SequenceProgress, count: int) -> bool:
    """Take blocks for the proposed tokens, if there are many free ones and the tenant's quota allows them."""
    cache, end = draft.cache, sequence.scheduled + 1 + count
    missing = -(-end // cache.block_size) - cache.num_blocks(sequence.id)
    if missing > 0:
        left = cache.quota_left(sequence.id)
        if (left is not None and missing > left) or cache.available_blocks < missing + 2 * len(draft.slice_by_seq):
            return False
    return cache.reserve(sequence.id, end)

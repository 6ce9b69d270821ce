"""Log-probabilities of many tokens in little memory."""

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import overload

from msgspec import Struct

from tiercel.server.text.vocabulary import Vocabulary
from tiercel.values.outcome import PromptReading, TokenLogprobs

_ENTRY_BYTES = 8  # a token id and a float32, the type in which the engine computes log-probabilities
_POSITION_BYTES = 12  # its end, the rank of its token and the place of its token in the text
_LEAST = -9999.0  # JSON has no infinity


def logprobs_bytes(count: int) -> int:
    """Return the memory of the log-probabilities of one token with `count` alternatives."""
    return _ENTRY_BYTES * (1 + count) + _POSITION_BYTES


class TokenChoice(Struct, frozen=True):
    """A token that was or could have been sampled."""

    token: int
    text: str
    bytes: bytes
    logprob: float


class DrawnToken(Struct, frozen=True):
    """The sampled token and the most likely ones."""

    drawn: TokenChoice
    likeliest: tuple[TokenChoice, ...]
    rank: int = 1  # of the sampled token, from 1; 0: it has no log-probability


class PackedLogprobs:
    """The log-probabilities of consecutive tokens of one sequence, in arrays."""

    __slots__ = ("_ends", "_logprobs", "_ranks", "_tokens", "text_starts")

    def __init__(self) -> None:
        self._tokens = array("I")  # of each position: the sampled token, then the likeliest ones
        self._logprobs = array("f")
        self._ends = array("I")  # of each position, in these two arrays
        self._ranks = array("I")  # of each position: of the sampled token
        self.text_starts = array("I")  # of each position: the character of the text at which its token begins

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def num_bytes(self) -> int:
        """The memory of the entries."""
        return len(self._tokens) * _ENTRY_BYTES + len(self._ends) * _POSITION_BYTES

    def append(self, entry: TokenLogprobs) -> None:
        """Add the next position."""
        self._tokens.append(entry.token)
        self._tokens.extend(entry.top_tokens)
        self._logprobs.append(entry.logprob)
        self._logprobs.extend(entry.top_logprobs)
        self._ends.append(len(self._tokens))
        self._ranks.append(entry.rank)
        self.text_starts.append(0)  # set when the token becomes text

    def append_part(self, part: PromptReading, tokens: Sequence[int]) -> None:
        """Add the positions of a part of a prompt. `tokens`: the prompt's tokens at these positions."""
        count, top_tokens, top_logprobs = part.num_top, array("I", part.top_tokens), array("f", part.top_logprobs)
        for index, (token, logprob) in enumerate(zip(tokens, array("f", part.logprobs), strict=True)):
            self._tokens.append(token)
            self._tokens.extend(top_tokens[index * count : (index + 1) * count])
            self._logprobs.append(logprob)
            self._logprobs.extend(top_logprobs[index * count : (index + 1) * count])
            self._ends.append(len(self._tokens))
        self._ranks.extend(array("I", part.ranks))
        self.text_starts.frombytes(bytes(len(part.ranks)))  # zeros: see `PromptAnswer.text_starts`

    def mean(self, count: int) -> float:
        """Return the mean log-probability of the first `count` sampled tokens; -inf if there are none."""
        return sum(self._logprobs[self._start(index)] for index in range(count)) / count if count else -math.inf

    def cut_text(self, length: int) -> None:
        """Place tokens that begin behind the first `length` characters of the text at its end."""
        for index in range(len(self.text_starts) - 1, -1, -1):
            if self.text_starts[index] <= length:
                return
            self.text_starts[index] = length

    def extend(self, other: "PackedLogprobs", start: int = 0, stop: int | None = None) -> None:
        """Add the positions from `start` to `stop` of others; positions that do not exist are left out."""
        stop = len(other) if stop is None else min(stop, len(other))
        if start >= stop:
            return
        first, last = other._start(start), other._ends[stop - 1]
        shift = len(self._tokens) - first
        self._tokens.extend(other._tokens[first:last])
        self._logprobs.extend(other._logprobs[first:last])
        self._ends.extend(end + shift for end in other._ends[start:stop])
        self._ranks.extend(other._ranks[start:stop])
        self.text_starts.extend(other.text_starts[start:stop])

    def drawn(self, position: int, vocabulary: Vocabulary) -> DrawnToken:
        """Return one position as text."""
        sampled, *likeliest = (
            _choice(vocabulary, self._tokens[index], self._logprobs[index])
            for index in range(self._start(position), self._ends[position])
        )
        return DrawnToken(sampled, tuple(likeliest), self._ranks[position])

    def _start(self, position: int) -> int:
        return self._ends[position - 1] if position else 0


class DrawnTokens(Sequence[DrawnToken]):
    """Log-probabilities as text. Each `DrawnToken` is made when it is asked for, and not kept."""

    __slots__ = ("_vocabulary", "packed")

    def __init__(self, packed: PackedLogprobs, vocabulary: Vocabulary) -> None:
        self.packed = packed
        self._vocabulary = vocabulary

    def choice(self, token: int, logprob: float) -> TokenChoice:
        """Return a token of this vocabulary as text."""
        return _choice(self._vocabulary, token, logprob)

    def __len__(self) -> int:
        return len(self.packed)

    @overload
    def __getitem__(self, index: int) -> DrawnToken: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[DrawnToken]: ...

    def __getitem__(self, index: int | slice) -> DrawnToken | Sequence[DrawnToken]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.packed.drawn(index % len(self), self._vocabulary)

    def __iter__(self) -> Iterator[DrawnToken]:
        return (self.packed.drawn(position, self._vocabulary) for position in range(len(self)))


def _choice(vocabulary: Vocabulary, token: int, logprob: float) -> TokenChoice:
    piece = vocabulary.token_bytes(token)
    return TokenChoice(token, piece.decode("utf-8", "replace"), piece, max(logprob, _LEAST))

"""The part of an answer that repeats the prompt: its text, its tokens and their log-probabilities."""

from array import array
from collections.abc import Callable, Sequence

from msgspec import Struct

from tiercel.server.client.logprobs import DrawnToken, DrawnTokens
from tiercel.server.text.detokenizer import make_detokenizer
from tiercel.server.text.vocabulary import Vocabulary


class PromptAnswer(Struct, frozen=True):
    """The prompt of one choice, as far as the client asked for it.

    The engine fills `logprobs` before the first token of the choice, or before its end if it has none: the entries of
    all tokens but the first. Of several choices of a whole answer, the first has computed them for all.
    """

    tokens: Sequence[int]
    text: str | None  # None: it is not repeated
    logprobs: DrawnTokens  # empty if the client did not ask for them
    read_pooled: "Callable[[], array[float]]"  # its pooled states, once they are computed, if they were asked for
    text_starts: Sequence[
        int
    ] = ()  # the character of `text` at which each token begins, if log-probabilities are asked

    @property
    def first(self) -> DrawnToken:
        """The first token, which nothing predicts: of rank 0, without a log-probability."""
        return DrawnToken(self.logprobs.choice(self.tokens[0], 0.0), (), rank=0)


def text_starts(tokens: Sequence[int], text: str, vocabulary: Vocabulary) -> "array[int]":
    """Return the character of `text` at which each of its tokens begins.

    A token that begins inside a character belongs to that character. A special token has the length of its text where
    the text has it, and otherwise none, as the BOS token that a tokenizer adds. No start lies behind the text.
    Cost: one step of a detokenizer for each token.
    """
    special_texts = dict(zip(vocabulary.special_ids, vocabulary.special_texts, strict=True))
    detokenizer = make_detokenizer(vocabulary, (), skip_special_tokens=True)
    starts, length = array("I"), 0
    for token in tokens:
        starts.append(min(length, len(text)))
        special = special_texts.get(token)
        if special is None:
            length += len(detokenizer.feed((token,)))
        elif text.startswith(special, length):
            length += len(special)
    return starts

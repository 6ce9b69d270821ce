"""Log-probabilities in arrays."""

import random
from array import array

import pytest

from tests.seeds import fresh_seeds
from tiercel.server.client.logprobs import DrawnTokens, PackedLogprobs, logprobs_bytes
from tiercel.server.text.tokenizer import TextCodec
from tiercel.values.ids import SeqId
from tiercel.values.outcome import TokenLogprobs


def _entries(rng: random.Random, count: int, vocabulary: int) -> list[TokenLogprobs]:
    entries: list[TokenLogprobs] = []
    for _ in range(count):
        tops = rng.randrange(5)
        values = array("f", [rng.uniform(-20, 0) for _ in range(tops + 1)])  # as the engine computes them
        tokens = tuple(rng.randrange(vocabulary) for _ in range(tops))
        entries.append(TokenLogprobs(SeqId(1), rng.randrange(vocabulary), values[0], 1, tokens, tuple(values[1:])))
    return entries


@pytest.mark.parametrize("seed", [0, *fresh_seeds(2)])
def test_what_is_packed_and_cut_and_joined_is_what_was_put_in(codec: TextCodec, seed: int) -> None:
    rng = random.Random(seed)
    vocabulary = codec.vocabulary
    entries = _entries(rng, 200, 300)
    whole = PackedLogprobs()
    at = 0
    while at < len(entries):  # pieces of any length, also empty ones and parts of others
        piece, size = PackedLogprobs(), rng.randrange(6)
        for entry in entries[at : at + size]:
            piece.append(entry)
        cut = rng.randrange(size + 1)
        whole.extend(piece, 0, cut)
        whole.extend(piece, cut, size + 3)
        at += size
    drawn = DrawnTokens(whole, vocabulary)
    assert len(drawn) == len(entries)
    for entry, one in zip(entries, drawn, strict=True):
        assert (one.drawn.bytes, one.drawn.logprob) == (vocabulary.token_bytes(entry.token), entry.logprob)
        assert [top.bytes for top in one.likeliest] == [vocabulary.token_bytes(token) for token in entry.top_tokens]
        assert [top.logprob for top in one.likeliest] == list(entry.top_logprobs)
    assert drawn[-1] == drawn[len(drawn) - 1] == drawn[190:][-1]
    assert whole.num_bytes == sum(logprobs_bytes(len(entry.top_tokens)) for entry in entries)


def test_a_log_probability_of_minus_infinity_can_be_written_as_json(codec: TextCodec) -> None:
    packed = PackedLogprobs()
    packed.append(TokenLogprobs(SeqId(1), 5, float("-inf"), 9, (), ()))
    assert DrawnTokens(packed, codec.vocabulary)[0].drawn.logprob == -9999.0
    with pytest.raises(IndexError):
        DrawnTokens(packed, codec.vocabulary)[1]

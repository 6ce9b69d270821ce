"""The text of a choice, and the places at which its tokens begin in it."""

import codecs
import random
from array import array
from collections.abc import Sequence

import pytest

from tests.seeds import fresh_seeds
from tiercel.server.api.replies.completion import TextShape
from tiercel.server.api.replies.head import ReplyHead
from tiercel.server.client.choice_text import ChoiceDelta, ChoiceText
from tiercel.server.client.collector import Delivery
from tiercel.server.client.prompt_answer import text_starts
from tiercel.server.text.detokenizer import make_detokenizer
from tiercel.server.text.stop import TextRules
from tiercel.server.text.tokenizer import TextCodec
from tiercel.values.ids import SeqId
from tiercel.values.outcome import Finished, FinishReason, TokenLogprobs

HEAD = ReplyHead(id="x", created=0, model="m", with_logprobs=True, with_details=False, role="assistant")
PIECES = ["a", "b", "ab", " ", "é", "🙂", "日本", "STOP", "ST", "OP", "</s>"]


def _entry(token: int, tops: Sequence[int] = ()) -> TokenLogprobs:
    return TokenLogprobs(SeqId(1), token, -0.5, 1, tuple(tops), tuple(-0.5 - index for index in range(len(tops))))


def _delivery(tokens: Sequence[int], finished: Finished | None = None) -> Delivery:
    delivery = Delivery(0)
    for token in tokens:
        delivery.tokens.append(token)
        delivery.logprobs.append(_entry(token))
    delivery.finished = finished
    return delivery


def _end(reason: FinishReason, stop_token: int | None = None) -> Finished:
    return Finished(seq=SeqId(1), reason=reason, num_prompt=1, num_outputs=1, num_cached=0, stop_token=stop_token)


def _choice(codec: TextCodec, rules: TextRules, *, returns_tokens: bool = False) -> ChoiceText:
    detokenizer = make_detokenizer(codec.vocabulary, (), skip_special_tokens=rules.skip_special_tokens)
    return ChoiceText(detokenizer, rules, codec.vocabulary, (), 1, returns_tokens=returns_tokens)


def _starts(deltas: Sequence[ChoiceDelta]) -> list[int]:
    return [start for delta in deltas for start in delta.logprobs.packed.text_starts]


@pytest.mark.parametrize("seed", [*range(30), *fresh_seeds(10)])
def test_a_token_begins_where_its_bytes_begin_and_never_behind_the_text(codec: TextCodec, seed: int) -> None:
    rng = random.Random(seed)
    vocabulary = codec.vocabulary
    stops = rng.choice([(), ("STOP",), ("OPa", "STOP")])
    rules = TextRules(stops=stops, include_stop=rng.random() < 0.5, skip_special_tokens=rng.random() < 0.5)
    returns_tokens = rng.random() < 0.5
    text = "".join(rng.choice(PIECES[:-1]) for _ in range(rng.randrange(1, 30)))
    tokens = codec.encode(text, add_special_tokens=False)
    tokens = [token for one in tokens for token in ((one, *vocabulary.specials) if rng.random() < 0.1 else (one,))]
    end_token = next(iter(vocabulary.special_ids))
    choice = _choice(codec, rules, returns_tokens=returns_tokens)
    deltas: list[ChoiceDelta] = []
    at = 0
    while not choice.is_done:
        size = rng.randrange(4)
        piece, at = tokens[at : at + size], at + size
        is_end = at >= len(tokens)
        stopped = is_end and rng.random() < 0.5
        finished = _end(FinishReason.STOP, end_token) if stopped else _end(FinishReason.LENGTH) if is_end else None
        delta = choice.advance(_delivery([*piece, end_token] if stopped else piece, finished))
        deltas += [] if delta is None else [delta]
    shown = "".join(delta.text for delta in deltas)
    starts = _starts(deltas)
    drawn = [entry.drawn for delta in deltas for entry in delta.logprobs]
    assert len(starts) == len(drawn)
    assert starts == sorted(starts)
    assert max(starts, default=0) <= len(shown)
    if returns_tokens:
        assert [entry.token for entry in drawn] == [token for delta in deltas for token in delta.tokens]
        assert len(drawn) == deltas[-1].num_outputs
    before = b""
    for entry, start in zip(drawn, starts, strict=True):
        assert start == min(len(codecs.utf_8_decode(before, "replace", False)[0]), len(shown)), f"seed {seed}"
        before += b"" if rules.skip_special_tokens and entry.token in vocabulary.specials else entry.bytes


def test_tokens_of_held_text_are_sent_with_their_text(codec: TextCodec) -> None:
    choice = _choice(codec, TextRules(stops=("ab!",)), returns_tokens=True)
    a, b, c = (codec.encode(letter, add_special_tokens=False)[0] for letter in "abc")
    sent = [choice.advance(_delivery([token])) for token in (c, a, b, c)]
    assert [None if delta is None else (delta.text, list(delta.tokens)) for delta in sent] == [
        ("c", [c]),
        None,
        None,
        ("abc", [a, b, c]),
    ]


def test_a_hidden_stop_token_has_an_entry_only_where_ids_are_returned(codec: TextCodec) -> None:
    (a,), end = codec.encode("a", add_special_tokens=False), codec.vocabulary.special_ids[0]
    for returns_tokens in (False, True):
        choice = _choice(codec, TextRules(), returns_tokens=returns_tokens)
        delta = choice.advance(_delivery([a, end], _end(FinishReason.STOP, end)))
        assert delta is not None
        assert (delta.text, len(delta.logprobs), delta.num_outputs) == ("a", 1 + returns_tokens, 2)
        assert list(delta.logprobs.packed.text_starts) == [0, 1][: 1 + returns_tokens]
        assert delta.num_hidden == returns_tokens


def test_alternatives_with_one_text_have_names_of_their_own(codec: TextCodec) -> None:
    emoji = codec.encode("🙂", add_special_tokens=False)  # none of the tokens is a character by itself
    assert len(emoji) > 1
    choice = _choice(codec, TextRules())
    delivery = Delivery(0)
    for token in emoji:
        delivery.tokens.append(token)
        delivery.logprobs.append(_entry(token, [*emoji, 100_000, 100_001]))  # two ids without any text
    delivery.finished = _end(FinishReason.LENGTH)
    delta = choice.advance(delivery)
    assert delta is not None
    (chunk,) = TextShape(HEAD).chunks(delta, None)
    logprobs = chunk.choices[0].logprobs
    assert logprobs is not None
    pieces = [codec.vocabulary.token_bytes(token) for token in emoji]
    names = ["bytes:" + "".join(f"\\x{byte:02x}" for byte in piece) for piece in pieces]
    assert logprobs.tokens == names
    assert logprobs.text_offset == [0] * len(emoji)
    for place, (entry, drawn) in enumerate(zip(logprobs.top_logprobs, names, strict=True)):
        assert entry is not None
        assert next(iter(entry)) == drawn
        assert sorted(entry) == sorted([*names, "", "token_id:100001"])
        assert entry[drawn] == -0.5 - place


@pytest.mark.parametrize("shown", [False, True])
def test_special_tokens_of_a_prompt_take_as_many_characters_as_the_text_has_of_them(
    codec: TextCodec, shown: bool
) -> None:
    vocabulary = codec.vocabulary
    bos, end = vocabulary.special_id_by_text["<s>"], vocabulary.special_id_by_text["</s>"]
    letters = codec.encode("aé", add_special_tokens=False)
    tokens = [bos, *letters, end, *letters]
    text = "<s>aé</s>aé" if shown else "aéaé"
    starts = text_starts(tokens, text, vocabulary)
    first = 3 if shown else 0
    inner = [first + start for start in text_starts(letters, "aé", vocabulary)]
    assert starts == array(
        "I", [0, *inner, first + 2, *(start + first + (6 if shown else 2) - first for start in inner)]
    )
    assert max(text_starts(tokens, "a", vocabulary)) == 1  # a text that its tokens do not spell

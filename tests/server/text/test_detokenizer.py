"""The incremental detokenizer."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.server.builders import build_byte_level, build_sentencepiece, build_word_pieces
from tiercel.server.text.detokenizer import make_detokenizer
from tiercel.server.text.vocabulary import Vocabulary

BYTE_LEVEL = build_byte_level()
SENTENCEPIECE = build_sentencepiece()
WORD_PIECES = build_word_pieces()
BYTE_VOCABULARY = Vocabulary.of(BYTE_LEVEL)
PIECE_VOCABULARY = Vocabulary.of(SENTENCEPIECE)
WORD_VOCABULARY = Vocabulary.of(WORD_PIECES)

texts = st.text(st.characters(codec="utf-8"), max_size=40) | st.sampled_from(
    ["👩‍🚀 naïve 你好", "🙂🙃", "  two  spaces ", "\ufffd", "a\u0301", "𐍈𒀀", "\u200d\u200d"]
)


def _streamed(vocabulary: Vocabulary, prompt: list[int], tokens: list[int], *, skip: bool = True) -> tuple[str, bool]:
    """Feed tokens one by one; return the text, and whether no part had a broken character."""
    detokenizer = make_detokenizer(vocabulary, prompt, skip_special_tokens=skip)
    parts = [detokenizer.feed([token]) for token in tokens]
    return "".join(parts) + detokenizer.flush(), not any("\ufffd" in part for part in parts)


def _after_prompt(tokenizer: Tokenizer, prompt: list[int], tokens: list[int], *, skip: bool = True) -> str:
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    return tokenizer.decode(prompt + tokens, skip_special_tokens=skip)[len(before) :]


@given(texts)
@settings(max_examples=200, deadline=None)
def test_byte_level_stream_equals_full_decode_of_any_text(text: str) -> None:
    prompt = BYTE_LEVEL.encode("prompt").ids
    tokens = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    streamed, is_clean = _streamed(BYTE_VOCABULARY, prompt, tokens)
    assert streamed == text == _after_prompt(BYTE_LEVEL, prompt, tokens)
    assert is_clean or "\ufffd" in text


@given(st.lists(st.integers(0, BYTE_VOCABULARY.size - 1), max_size=30), st.booleans())
@settings(max_examples=200, deadline=None)
def test_byte_level_stream_equals_full_decode_of_any_tokens(tokens: list[int], skip: bool) -> None:
    streamed, _ = _streamed(BYTE_VOCABULARY, [5], tokens, skip=skip)
    assert streamed == BYTE_LEVEL.decode([5, *tokens], skip_special_tokens=skip)[1:]


@given(texts)
@settings(max_examples=200, deadline=None)
def test_byte_fallback_stream_equals_full_decode_of_any_text(text: str) -> None:
    prompt = SENTENCEPIECE.encode("the").ids
    tokens = SENTENCEPIECE.encode(text).ids
    streamed, is_clean = _streamed(PIECE_VOCABULARY, prompt, tokens)
    assert streamed == _after_prompt(SENTENCEPIECE, prompt, tokens)
    assert is_clean or "\ufffd" in text


@given(texts)
@settings(max_examples=100, deadline=None)
def test_byte_fallback_strips_the_first_space_after_a_prompt_without_text(text: str) -> None:
    begin = SENTENCEPIECE.token_to_id("<s>")
    tokens = SENTENCEPIECE.encode(text).ids
    streamed, _ = _streamed(PIECE_VOCABULARY, [begin], tokens)
    assert streamed == SENTENCEPIECE.decode([begin, *tokens])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_a_decoder_that_looks_at_neighbours_streams_its_full_decode(tokens: list[int]) -> None:
    prompt = WORD_PIECES.encode("hello").ids
    streamed, _ = _streamed(WORD_VOCABULARY, prompt, tokens)
    assert streamed == _after_prompt(WORD_PIECES, prompt, tokens)


@given(texts, st.integers(1, 7))
@settings(max_examples=100, deadline=None)
def test_chunks_of_any_size_give_the_same_text(text: str, size: int) -> None:
    tokens = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    detokenizer = make_detokenizer(BYTE_VOCABULARY, [5], skip_special_tokens=True)
    parts = [detokenizer.feed(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    assert "".join(parts) + detokenizer.flush() == text


def test_an_emoji_is_held_back_until_its_last_byte() -> None:
    tokens = SENTENCEPIECE.encode("🙂").ids[1:]
    assert len(tokens) == 4
    detokenizer = make_detokenizer(PIECE_VOCABULARY, tokens, skip_special_tokens=True)
    assert [detokenizer.feed([token]) for token in tokens] == ["", "", "", "🙂"]


def test_an_unfinished_character_becomes_one_replacement_at_the_end() -> None:
    tokens = SENTENCEPIECE.encode("🙂").ids[1:3]
    detokenizer = make_detokenizer(PIECE_VOCABULARY, tokens, skip_special_tokens=True)
    assert detokenizer.feed(tokens) == ""
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_are_shown_unless_they_are_skipped() -> None:
    end = BYTE_LEVEL.token_to_id("<|im_end|>")
    hidden, _ = _streamed(BYTE_VOCABULARY, [5], [end], skip=True)
    shown, _ = _streamed(BYTE_VOCABULARY, [5], [end], skip=False)
    assert (hidden, shown) == ("", "<|im_end|>")


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    detokenizer = make_detokenizer(BYTE_VOCABULARY, [5], skip_special_tokens=True)
    assert detokenizer.feed([BYTE_VOCABULARY.size, BYTE_VOCABULARY.size + 5]) == ""

"""Tokenizers of GGUF files: the same tokens as the tokenizer that was written, and errors that name the key."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from tests.modelfile.written import add_tokens, finish
from tests.seeds import fresh_seeds
from tests.server.builders import CORPUS, build_byte_level
from tiercel.modelfile.errors import ModelFileError
from tiercel.modelfile.fields import MetadataFields
from tiercel.modelfile.header import read_header
from tiercel.modelfile.tokenizer import FileTokenizer, read_tokenizer
from tiercel.server.text.tokenizer import TextCodec

SEEDS = [1, 2, *fresh_seeds(2)]
PIECES = [
    "the",
    " the",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "1",
    "2024",
    "don't",
    "DON'T",
    "é",
    "你好",
    "🙂",
    "_x",
    "<s>",
    "<think>",
]


def read(path: Path) -> tuple[Tokenizer, FileTokenizer]:
    found = read_tokenizer(MetadataFields(read_header(path)))
    return Tokenizer.from_str(json.dumps(found.tokenizer)), found


def write(path: Path, tokens: Sequence[str], types: Sequence[int], fill: Callable[[gguf.GGUFWriter], None]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    fill(writer)
    finish(writer)
    return path


def random_text(rng: random.Random) -> str:
    words = [
        *PIECES,
        *" ".join(CORPUS[:3]).split(" "),
        chr(rng.randrange(32, 0x3000)),
        chr(rng.randrange(0x1F300, 0x1F600)),
    ]
    return "".join(rng.choice(["", " ", ""]) + rng.choice(words) for _ in range(rng.randrange(0, 30)))


def listed(
    spec: Mapping[str, Any], pre: str, starts: bool
) -> tuple[list[str], list[int], Callable[[gguf.GGUFWriter], None]]:
    """Return the tokens and types of a tokenizer.json, and a function that writes the rest."""
    ids = dict(spec["model"]["vocab"])
    kinds = dict.fromkeys(ids, 1)
    for entry in spec["added_tokens"]:
        ids[entry["content"]] = entry["id"]
        kinds[entry["content"]] = 3 if entry["special"] else 4
    texts = sorted(ids, key=ids.__getitem__)

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
        writer.add_bos_token_id(ids["<s>"])
        writer.add_eos_token_id(ids["</s>"])
        writer.add_add_bos_token(starts)

    return texts, [kinds[text] for text in texts], fill


@pytest.mark.parametrize("seed", SEEDS)
def test_letters_that_are_bytes_give_the_tokens_of_the_tokenizer_that_was_written(seed: int, tmp_path: Path) -> None:
    original = build_byte_level()
    spec = json.loads(original.to_str())
    found, _ = read(write(tmp_path / "a.gguf", *listed(spec, "gpt-2", starts=True)))
    rng = random.Random(seed)
    for text in ["", *(random_text(rng) for _ in range(200))]:
        for special in (True, False):
            expected = original.encode(text, add_special_tokens=special).ids
            assert found.encode(text, add_special_tokens=special).ids == expected, (seed, text)
        assert found.decode(expected, skip_special_tokens=False) == original.decode(expected, skip_special_tokens=False)


def test_control_tokens_are_special_and_defined_ones_are_not(tmp_path: Path) -> None:
    original = build_byte_level()
    found, _ = read(write(tmp_path / "a.gguf", *listed(json.loads(original.to_str()), "gpt-2", starts=False)))
    expected = {token: (entry.content, entry.special) for token, entry in original.get_added_tokens_decoder().items()}
    assert {
        token: (entry.content, entry.special) for token, entry in found.get_added_tokens_decoder().items()
    } == expected
    assert found.encode("a").ids == original.encode("a", add_special_tokens=False).ids  # the file says: no start


@pytest.mark.parametrize("seed", SEEDS[1:3])
@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken"])
def test_texts_are_divided_by_the_expression_of_each_name(pre: str, seed: int, tmp_path: Path) -> None:
    spec = json.loads(build_byte_level().to_str())
    _, found = read(write(tmp_path / "a.gguf", *listed(spec, pre, starts=False)))
    steps: Any = found.tokenizer["pre_tokenizer"]
    (expression,) = [step["pattern"]["Regex"] for step in steps["pretokenizers"] if step["type"] == "Split"]
    assert expression == GGUF_PRE_TOKENIZER_SPLITS[pre]
    assert bool(found.tokenizer["normalizer"]) == (pre == "qwen2")
    built, _ = read(tmp_path / "a.gguf")
    words = pre_tokenizers.Sequence([built.pre_tokenizer]).pre_tokenize_str(random_text(random.Random(seed)))
    assert all(word for word, _ in words)


def test_digits_are_divided_where_the_name_says_so(tmp_path: Path) -> None:
    spec = json.loads(build_byte_level().to_str())
    for pre, expected in (("smollm", ["a", "1", "2", "3"]), ("gpt-2", ["a", "123"])):
        found, _ = read(write(tmp_path / pre, *listed(spec, pre, starts=False)))
        assert [word for word, _ in found.pre_tokenizer.pre_tokenize_str("a123")] == expected


def test_a_word_that_is_a_token_needs_no_merges_where_the_name_says_so(tmp_path: Path) -> None:
    tokens = ["<s>", *"abcd", "ab", "abcd"]

    def fill(pre: str) -> Callable[[gguf.GGUFWriter], None]:
        def add(writer: gguf.GGUFWriter) -> None:
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre(pre)
            writer.add_token_merges(["a b"])
            writer.add_bos_token_id(0)

        return add

    types = [3, *[1] * 6]
    whole, found = read(write(tmp_path / "a.gguf", tokens, types, fill("llama-bpe")))
    assert whole.encode("abcd").tokens == ["<s>", "abcd"]  # and the start is added, because nothing is said
    assert found.start == 0
    assert read(write(tmp_path / "b.gguf", tokens, types, fill("qwen2")))[0].encode("abcd").tokens == ["ab", "c", "d"]


# ---- letters that are characters


def merged_by_score(text: str, scores: Mapping[str, float]) -> list[str]:
    """Merge the best pair until none is left, as SentencePiece does; the first of equal ones."""
    parts = list(text)
    while True:
        pairs = [
            (-scores[left + right], place)
            for place, (left, right) in enumerate(pairwise(parts))
            if left + right in scores
        ]
        if not pairs:
            return parts
        place = min(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def score_fill(scores: Sequence[float], **flags: bool) -> Callable[[gguf.GGUFWriter], None]:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(list(scores))
        for name, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)

    return fill


@pytest.mark.parametrize("seed", SEEDS)
def test_characters_are_merged_in_the_order_of_scores(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    pieces = ["▁", *"abcd"]
    while len(pieces) < 60:
        joined = rng.choice(pieces) + rng.choice(pieces)
        if joined not in pieces and len(joined) < 9:
            pieces.append(joined)
    heads = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    score_by_piece = {piece: -float(rank) for rank, piece in enumerate(rng.sample(pieces, len(pieces)))}
    tokens = [*heads, *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    fill = score_fill([0.0] * len(heads) + [score_by_piece[piece] for piece in pieces])
    found, details = read(write(tmp_path / "a.gguf", tokens, types, fill))
    assert (details.start, details.ends) == (1, (2,))
    for _ in range(100):
        text = "".join(rng.choice("abcd ") for _ in range(rng.randrange(1, 40)))
        expected = merged_by_score("▁" + text.replace(" ", "▁"), score_by_piece)
        assert found.encode(text).tokens == ["<s>", *expected], (seed, text)
        assert found.decode(found.encode(text).ids) == text, (seed, text)
    assert found.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    codec = TextCodec(json.dumps(details.tokenizer), dict(details.config), None)
    assert codec.vocabulary.token_bytes(tokens.index("<0xC3>")) == b"\xc3"
    assert codec.named_specials == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_no_space_is_put_before_a_text_where_the_file_says_so(tmp_path: Path) -> None:
    tokens, types = ["<unk>", "<s>", "</s>", "▁", "a"], [2, 3, 3, 1, 1]
    path = write(tmp_path / "a.gguf", tokens, types, score_fill([0.0] * 5, add_space_prefix=False, add_bos_token=False))
    found, details = read(path)
    assert found.encode("a a").tokens == ["a", "▁", "a"]
    assert found.decode([3, 4], skip_special_tokens=False) == " a"
    assert details.config["add_bos_token"] is False


# ---- ends


def test_tokens_that_end_an_answer_are_those_of_the_file_and_the_known_ones(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(3)
        writer.add_eot_token_id(4)
        writer.add_add_eos_token(True)

    tokens = ["a", "b", "ab", "<stop>", "<turn>", "<|im_end|>"]
    found, details = read(write(tmp_path / "a.gguf", tokens, [1] * 6, fill))
    assert details.ends == (3, 4, 5)
    assert found.encode("ab").tokens == ["ab", "<stop>"]
    assert set(found.get_added_tokens_decoder()) == {3, 4, 5}  # ends are control tokens, whatever their type


# ---- errors


def with_tokens(*tokens: str) -> Callable[[gguf.GGUFWriter], None]:
    return lambda writer: writer.add_token_list(list(tokens))


WRONG: dict[str, tuple[Callable[[gguf.GGUFWriter], None], str]] = {
    "another kind": (
        lambda w: w.add_tokenizer_model("bert"),
        "tokenizer.ggml.model: bert is not supported; known: gpt2, llama",
    ),
    "an unknown division": (
        lambda w: w.add_tokenizer_pre("viking"),
        "tokenizer.ggml.pre: viking is not supported; known: llama-bpe",
    ),
    "equal tokens": (with_tokens("a", "b", "a"), "tokenizer.ggml.tokens: tokens 0 and 2 are both 'a'"),
    "a merge of unknown tokens": (
        lambda w: w.add_token_merges(["a b", "b x"]),
        "tokenizer.ggml.merges: entry 1 is 'b x'",
    ),
    "a merge of one token": (lambda w: w.add_token_merges(["ab"]), "tokenizer.ggml.merges: entry 0 is 'ab'"),
    "an end outside": (lambda w: w.add_eos_token_id(99), "tokenizer.ggml.eos_token_id: must be from 0 to 31, not 99"),
    "a flag that is a number": (
        lambda w: w.add_uint32("tokenizer.ggml.add_bos_token", 1),
        "add_bos_token: must be true or false",
    ),
    "types of other tokens": (
        lambda w: w.add_token_types([1, 1]),
        "tokenizer.ggml.token_type: must be a list of 32 numbers",
    ),
    "a template that is a number": (
        lambda w: w.add_uint32("tokenizer.chat_template", 1),
        "tokenizer.chat_template: must be a string",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_by_its_key(name: str, tmp_path: Path) -> None:
    change, words = WRONG[name]
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    add_tokens(writer)
    for entries in writer.kv_data:
        kept = dict(entries)
        entries.clear()
        change(writer)
        entries.update({key: value for key, value in kept.items() if key not in entries})
    finish(writer)
    with pytest.raises(ModelFileError) as caught:
        read(tmp_path / "a.gguf")
    assert f"{tmp_path / 'a.gguf'}: metadata" in str(caught.value)
    assert words in str(caught.value)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    finish(gguf.GGUFWriter(tmp_path / "a.gguf", "llama"))
    with pytest.raises(ModelFileError, match=r"metadata tokenizer\.ggml\.model is missing"):
        read(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("fill", "words"),
    [
        (lambda w: w.add_tokenizer_model("llama"), "tokenizer.ggml.scores: is missing"),
        (score_fill([0.0, float("nan"), 0.0, 0.0]), "tokenizer.ggml.scores: must be a list of finite numbers"),
        (score_fill([0.0] * 4, remove_extra_whitespaces=True), "remove_extra_whitespaces: is not supported"),
        (score_fill([0.0] * 4), "has 200 characters, at most 128 are read"),
    ],
)
def test_wrong_scores_are_refused(fill: Callable[[gguf.GGUFWriter], None], words: str, tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", ["<unk>", "<s>", "</s>", "a" * 200], [2, 3, 3, 1], fill)
    with pytest.raises(ModelFileError) as caught:
        read(tmp_path / "a.gguf")
    assert words in str(caught.value)

"""Prompts whose middle is wanted."""

import pytest
from tokenizers import AddedToken

from tests.server.builders import build_byte_level
from tiercel.server.text.fill_in import FillInTokens
from tiercel.server.text.tokenizer import TextCodec


@pytest.mark.parametrize(
    "names",
    [
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
        ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ],
)
def test_a_prompt_is_prefix_suffix_middle(names: tuple[str, str, str]) -> None:
    tokenizer = build_byte_level()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    codec = TextCodec(tokenizer.to_str(), {}, None)
    tokens = FillInTokens.of(codec)
    assert tokens is not None
    prefix, suffix, middle = (codec.token_id(name) for name in names)
    before, after = (codec.encode(text, add_special_tokens=False) for text in ("def main(", ")\n"))
    whole = tokens.prompt(codec, "def main(", after, add_special_tokens=True)
    assert whole == [codec.token_id("<s>"), prefix, *before, suffix, *after, middle]
    assert tokens.prompt(codec, [7, 8], after, add_special_tokens=True) == [prefix, 7, 8, suffix, *after, middle]


def test_a_tokenizer_without_such_tokens_has_none() -> None:
    assert FillInTokens.of(TextCodec(build_byte_level().to_str(), {}, None)) is None

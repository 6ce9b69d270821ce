"""Answers of /tokenize and /detokenize."""

from msgspec import Struct


class TokenizeReply(Struct, frozen=True):
    """The tokens of a prompt."""

    count: int
    max_model_len: int  # tokens
    tokens: list[int]
    token_strs: list[str | None] | None  # as the tokenizer spells them; null unless `return_token_strs`


class DetokenizeReply(Struct, frozen=True):
    """The text of tokens."""

    prompt: str

"""Fill-in-the-middle prompts, for models whose tokenizer has the tokens of such prompts."""

from msgspec import Struct

from tiercel.server.text.tokenizer import TextCodec


class FillInTokens(Struct, frozen=True):
    """The token ids before the beginning, before the end, and behind the end of a text whose middle is wanted.

    Source: arXiv 2207.14255, section 3: prefix, suffix, middle.
    """

    prefix: int
    suffix: int
    middle: int

    @staticmethod
    def of(codec: TextCodec) -> "FillInTokens | None":
        """Return the tokens of a tokenizer; None if it has none that are known."""
        for names in _NAMES:
            ids = [token for token in map(codec.token_id, names) if token is not None]
            if len(ids) == len(names):
                return FillInTokens(*ids)
        return None

    def prompt(
        self, codec: TextCodec, prefix: str | list[int], after: list[int], *, add_special_tokens: bool
    ) -> list[int]:
        """Return the tokens of a prompt; `after` are those of the suffix.

        In a prefix that is a text, special tokens are recognised.
        """
        first = codec.encode("", add_special_tokens=True) if add_special_tokens and isinstance(prefix, str) else []
        before = codec.encode(prefix, add_special_tokens=False) if isinstance(prefix, str) else prefix
        # Of tokenizers that add a token at the end as well, none is for such prompts.
        return [*first[:1], self.prefix, *before, self.suffix, *after, self.middle]


_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),  # DeepSeek; full-width bars
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
)

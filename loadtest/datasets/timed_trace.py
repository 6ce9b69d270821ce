"""`timed_trace`: the Mooncake trace format. Times, lengths, and which blocks of 512 tokens two prompts share."""

import random

from msgspec import Struct, ValidationError, convert

from loadtest.conversation import Conversation
from loadtest.datasets.dataset import Order, enough, json_lines, single
from tiercel.errors import ConfigError

_BLOCK_TOKENS = 512


class _Line(Struct):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def conversations(order: Order) -> list[Conversation]:
    """The first `count` lines. Equal hash ids give equal text: prefixes are shared as recorded. Errors: ConfigError."""
    blocks: dict[int, str] = {}
    found: list[Conversation] = []
    for number, values in json_lines(order.path):
        if len(found) == order.count:
            break
        try:
            line = convert(values, _Line)
        except ValidationError as exc:
            raise ConfigError("bench.dataset", f"--dataset-path {order.path} line {number}: {exc}") from exc
        prompt = _prompt(order, line, blocks, order.words(f"end/{number}"))
        wanted = order.settings.output_len or max(1, line.output_length)
        found.append(single(prompt, max(1, line.input_length), wanted, line.timestamp / 1000))
    return enough(found, order)


def _prompt(order: Order, line: _Line, blocks: dict[int, str], rng: random.Random) -> str:
    """Blocks by their ids; the last one, cut short, and what no id names is the line's own."""
    whole = line.hash_ids[: line.input_length // _BLOCK_TOKENS]
    for block in whole:
        if block not in blocks:
            blocks[block] = order.texts.text(_BLOCK_TOKENS, order.words(f"block/{block}"))
    left = max(1, line.input_length) - len(whole) * _BLOCK_TOKENS
    return "".join(blocks[block] for block in whole) + (order.texts.text(left, rng) if left else "")

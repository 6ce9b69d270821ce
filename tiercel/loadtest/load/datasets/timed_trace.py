"""`timed_trace`: the Mooncake trace format, with times, lengths and the blocks of 512 tokens that prompts share."""

import random
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct, ValidationError, convert

from tiercel.loadtest.load.conversation import Conversation
from tiercel.loadtest.load.datasets.dataset import DatasetQuery, enough, json_lines, single
from tiercel.values.errors import ConfigError

BLOCK_TOKENS = 512


class TimedLine(Struct):
    """One request of the trace. Each hash id names a block of 512 tokens; the last block may be shorter."""

    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def conversations(query: DatasetQuery) -> list[Conversation]:
    """Return the first `count` requests. Equal hash ids give equal text. Errors: ConfigError."""
    blocks: dict[int, str] = {}
    found: list[Conversation] = []
    for number, line in enumerate(timed_lines(query.path, query.count), start=1):
        prompt = _prompt(query, line, blocks, query.words(f"end/{number}"))
        wanted = query.settings.output_len or max(1, line.output_length)
        found.append(single(prompt, max(1, line.input_length), wanted, line.timestamp / 1000))
    return enough(found, query)


def timed_lines(path: Path, most: int) -> Iterator[TimedLine]:
    """Yield at most `most` lines. Errors: ConfigError that names the line."""
    left = most
    for number, values in json_lines(path):
        if not left:
            return
        left -= 1
        try:
            line = convert(values, TimedLine)
        except ValidationError as exc:
            raise ConfigError("bench.dataset", f"--dataset-path {path} line {number}: {exc}") from exc
        blocks = -(-line.input_length // BLOCK_TOKENS)
        if line.hash_ids and not blocks - 1 <= len(line.hash_ids) <= blocks:
            found = f"{len(line.hash_ids)} hash ids of {BLOCK_TOKENS} tokens for {line.input_length} tokens"
            raise ConfigError("bench.dataset", f"--dataset-path {path} line {number}: {found}")
        yield line


def _prompt(query: DatasetQuery, line: TimedLine, blocks: dict[int, str], rng: random.Random) -> str:
    """Return the blocks by their ids; an incomplete last block and tokens without an id get words of their own."""
    whole = line.hash_ids[: line.input_length // BLOCK_TOKENS]
    for block in whole:
        if block not in blocks:
            blocks[block] = query.texts.text(BLOCK_TOKENS, query.words(f"block/{block}"))
    left = max(1, line.input_length) - len(whole) * BLOCK_TOKENS
    return "".join(blocks[block] for block in whole) + (query.texts.text(left, rng) if left else "")

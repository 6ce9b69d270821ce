"""`sonnet`: prompts of lines of poetry with shared first lines, as in vLLM's benchmark of this name."""

import random

from tiercel.loadtest.load.conversation import Conversation
from tiercel.loadtest.load.datasets.dataset import DatasetQuery, read_text, single
from tiercel.loadtest.load.datasets.sonnet_lines import LINES
from tiercel.values.errors import ConfigError

_TASK = "Pick as many lines as you can from these poem lines:\n"


def conversations(query: DatasetQuery) -> list[Conversation]:
    """Return prompts of up to `input_len` tokens, `prefix_len` of them shared, from the file or the built-in lines.

    Lines are not cut: a prompt may be shorter than `input_len` by up to one line. Errors: ConfigError.
    """
    settings = query.settings
    lines = [line for line in read_text(query.path).splitlines() if line.strip()] if settings.path else list(LINES)
    if not lines:
        raise ConfigError("bench.dataset", f"--dataset-path {settings.path}: no lines")
    tokens_by_line = {line: query.texts.count(line + "\n") for line in dict.fromkeys(lines)}
    lengths = settings.lengths()
    input_len, output_len = lengths.input_len, lengths.output_len
    task = query.texts.count(_TASK)
    if input_len <= task:
        raise ConfigError(
            "bench.dataset", f"dataset sonnet: an input of {input_len} tokens is too short for a line of poetry"
        )
    rng = query.words("lines")
    shared = _draw(tokens_by_line, lines, min(lengths.prefix_len, input_len) - task, rng, is_random=False)
    used = task + sum(tokens_by_line[line] for line in shared)
    found: list[Conversation] = []
    for _ in range(query.count):
        own = _draw(tokens_by_line, lines, input_len - used, rng, is_random=True)
        tokens = used + sum(tokens_by_line[line] for line in own)
        found.append(single(_TASK + "\n".join([*shared, *own]), tokens, output_len))
    return found


def _draw(
    tokens_by_line: dict[str, int], lines: list[str], tokens: int, rng: random.Random, *, is_random: bool
) -> list[str]:
    """Return lines in order, or at random, up to `tokens` tokens."""
    drawn: list[str] = []
    while tokens > 0:
        line = rng.choice(lines) if is_random else lines[len(drawn) % len(lines)]
        tokens -= tokens_by_line[line]
        if tokens >= 0:
            drawn.append(line)
    return drawn

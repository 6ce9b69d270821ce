"""`sharegpt`: recorded questions, with the lengths of the recorded answers."""

from collections.abc import Iterator

from tiercel.loadtest.load.conversation import Conversation
from tiercel.loadtest.load.datasets.dataset import DatasetQuery, enough, read_json, read_text, single
from tiercel.values.errors import ConfigError

_MIN_TOKENS = 4
_MAX_INPUT_TOKENS = 1024
_MAX_TOKENS = 2048


def conversations(query: DatasetQuery) -> list[Conversation]:
    """Return the first question of each recorded conversation in random order, without very short and long ones.

    `output_len` overrides the length of the answers; then only the length of the prompt is checked.
    """
    pairs = [texts[:2] for texts in recorded_texts(query)]
    query.rng("order").shuffle(pairs)
    fixed = query.settings.output_len
    found: list[Conversation] = []
    for prompt, answer in pairs:
        if len(found) == query.count:
            break
        if len(prompt) > 16 * _MAX_INPUT_TOKENS:
            continue  # too long with any tokenizer
        tokens = query.texts.count(prompt)
        wanted = fixed or query.texts.count(answer)
        if tokens < _MIN_TOKENS or wanted < _MIN_TOKENS:
            continue
        if tokens > _MAX_INPUT_TOKENS or (not fixed and tokens + wanted > _MAX_TOKENS):
            continue
        found.append(single(prompt, tokens, wanted))
    return enough(found, query)


def recorded_texts(query: DatasetQuery) -> Iterator[list[str]]:
    """Yield the texts of each conversation of at least two turns. Errors: ConfigError."""
    entries = read_json(query.path, read_text(query.path))
    if not isinstance(entries, list):
        raise ConfigError("bench.dataset", f"--dataset-path {query.path}: not a list of conversations")
    for entry in entries:
        recorded = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
        if not isinstance(recorded, list) or len(recorded) < 2:
            continue
        texts = [turn.get("value") for turn in recorded if isinstance(turn, dict)]
        if len(texts) == len(recorded) and all(isinstance(text, str) for text in texts):
            yield [str(text) for text in texts]

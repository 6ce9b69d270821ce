"""`burstgpt`: recorded lengths and times of a service (CSV), with random words as prompts."""

import csv
from pathlib import Path

from msgspec import Struct

from tiercel.loadtest.load.conversation import Conversation
from tiercel.loadtest.load.datasets.dataset import DatasetQuery, enough, read_text, single
from tiercel.values.errors import ConfigError

_COLUMNS = ("Model", "Request tokens", "Response tokens")


class AnsweredRequest(Struct, frozen=True):
    """One answered request of the recording."""

    at_s: float | None
    input_tokens: int
    output_tokens: int


def answered_rows(path: Path) -> list[AnsweredRequest]:
    """Return the answered requests to GPT-4 in recorded order, or all if the file has none to GPT-4.

    Errors: ConfigError.
    """
    rows = list(csv.DictReader(read_text(path).splitlines()))
    missing = [name for name in _COLUMNS if rows and name not in rows[0]]
    if missing:
        raise ConfigError("bench.dataset", f"--dataset-path {path}: no column {missing[0]!r}")
    rows = [row for row in rows if row["Model"] == "GPT-4"] or rows
    try:
        found = [
            AnsweredRequest(
                float(row["Timestamp"]) if row.get("Timestamp") else None,
                int(row["Request tokens"]),
                int(row["Response tokens"]),
            )
            for row in rows
        ]
    except (ValueError, TypeError) as exc:
        raise ConfigError("bench.dataset", f"--dataset-path {path}: {exc}") from exc
    return [row for row in found if row.input_tokens > 0 and row.output_tokens > 0]


def conversations(query: DatasetQuery) -> list[Conversation]:
    """Return consecutive answered requests from a random position. Errors: ConfigError."""
    rows = answered_rows(query.path)
    first = query.rng("order").randint(0, max(0, len(rows) - query.count))
    words = query.words()
    found = [
        single(
            query.texts.text(row.input_tokens, words),
            row.input_tokens,
            query.settings.output_len or row.output_tokens,
            row.at_s,
        )
        for row in rows[first : first + query.count]
    ]
    return enough(found, query)

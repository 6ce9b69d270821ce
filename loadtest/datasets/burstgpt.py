"""`burstgpt`: lengths and times of a recorded service (CSV), with random words in the prompts."""

import csv

from loadtest.conversation import Conversation
from loadtest.datasets.dataset import Order, enough, read_text, single
from tiercel.errors import ConfigError

_COLUMNS = ("Model", "Request tokens", "Response tokens")


def conversations(order: Order) -> list[Conversation]:
    """Answered requests to GPT-4, in the recorded order from a place drawn from the seed.

    A file that knows other models only is taken whole. Errors: ConfigError.
    """
    rows = list(csv.DictReader(read_text(order.path).splitlines()))
    missing = [name for name in _COLUMNS if rows and name not in rows[0]]
    if missing:
        raise ConfigError("bench.dataset", f"--dataset-path {order.path}: no column {missing[0]!r}")
    rows = [row for row in rows if row["Model"] == "GPT-4"] or rows
    try:
        rows = [row for row in rows if int(row["Response tokens"]) > 0 and int(row["Request tokens"]) > 0]
        first = order.rng("order").randint(0, max(0, len(rows) - order.count))
        words = order.words()
        found = [
            single(
                order.texts.text(int(row["Request tokens"]), words),
                int(row["Request tokens"]),
                order.settings.output_len or int(row["Response tokens"]),
                float(row["Timestamp"]) if row.get("Timestamp") else None,
            )
            for row in rows[first : first + order.count]
        ]
    except (ValueError, TypeError) as exc:
        raise ConfigError("bench.dataset", f"--dataset-path {order.path}: {exc}") from exc
    return enough(found, order)

"""Datasets by name."""

from typing import get_args

from tiercel.loadtest.load.conversation import Conversation
from tiercel.loadtest.load.datasets import (
    burstgpt,
    custom,
    multi_turn,
    prefix_repetition,
    random_words,
    sharegpt,
    sonnet,
    timed_trace,
)
from tiercel.loadtest.load.datasets.dataset import Dataset, DatasetQuery
from tiercel.loadtest.load.mix import DatasetName

_BY_NAME: dict[DatasetName, Dataset] = {
    "random": random_words.conversations,
    "sharegpt": sharegpt.conversations,
    "sonnet": sonnet.conversations,
    "burstgpt": burstgpt.conversations,
    "custom": custom.conversations,
    "prefix_repetition": prefix_repetition.conversations,
    "timed_trace": timed_trace.conversations,
    "multi_turn": multi_turn.conversations,
}
NAMES: tuple[str, ...] = get_args(DatasetName)


def conversations(query: DatasetQuery) -> list[Conversation]:
    """Return the conversations of the dataset named in the settings. Errors: ConfigError."""
    return _BY_NAME[query.settings.name](query)

"""What every dataset yields: conversations, most of a single turn."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from tiercel.errors import ConfigError
from tiercel.loadtest.load.conversation import Conversation, Turn
from tiercel.loadtest.load.mix import DatasetSettings
from tiercel.loadtest.load.tokens import TextMaker


class DatasetQuery(Struct, frozen=True):
    """What a dataset is asked for."""

    settings: DatasetSettings
    count: int
    seed: str
    texts: TextMaker
    words_seed: str = ""  # other words with the same lengths and times: a prefix cache must not know them

    def rng(self, purpose: str = "") -> random.Random:
        """A generator of its own for every purpose: drawing for one does not move another."""
        return random.Random(f"{self.seed}/{self.settings.name}/{purpose}")  # noqa: S311 - texts, not secrets

    def words(self, purpose: str = "words") -> random.Random:
        """As `rng`, for what a prompt says rather than how long it is."""
        return self.rng(f"{purpose}/{self.words_seed}")

    @property
    def path(self) -> Path:
        if self.settings.path is None:
            raise ConfigError("bench.dataset", f"dataset {self.settings.name} needs a path")
        return Path(self.settings.path)


Dataset = Callable[[DatasetQuery], list[Conversation]]


def single(prompt: str, input_tokens: int, output_tokens: int, recorded_s: float | None = None) -> Conversation:
    """A conversation of one turn."""
    return Conversation((Turn(prompt, input_tokens, output_tokens),), recorded_s)


def varied(length: int, ratio: float, rng: random.Random) -> int:
    """A length drawn evenly from [length * (1 - ratio), length * (1 + ratio)], at least 1."""
    if not ratio:
        return length
    return max(1, rng.randint(round(length * (1 - ratio)), round(length * (1 + ratio))))


def read_text(path: Path) -> str:
    """A dataset file. Errors: ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError("bench.dataset", f"--dataset-path {path}: {exc}") from exc


def read_json(path: Path, text: str | bytes, place: str = "") -> object:
    """JSON out of a dataset file. Errors: ConfigError that says where."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ConfigError("bench.dataset", f"--dataset-path {path}{place}: {exc}") from exc


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """The objects of a JSON-lines file with the numbers of their lines. Errors: ConfigError."""
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        value = read_json(path, line, f" line {number}")
        if not isinstance(value, dict):
            raise ConfigError("bench.dataset", f"--dataset-path {path} line {number}: not an object")
        yield number, value


def enough(found: list[Conversation], query: DatasetQuery) -> list[Conversation]:
    """The first `count`. Errors: ConfigError when there is nothing at all; fewer than asked is a shorter run."""
    if not found:
        raise ConfigError("bench.dataset", f"dataset {query.settings.name}: no usable request in {query.settings.path}")
    return found[: query.count]

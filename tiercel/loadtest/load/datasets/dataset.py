"""The interface and the common parts of datasets."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from tiercel.loadtest.load.conversation import Conversation, Turn
from tiercel.loadtest.load.mix import DatasetSettings
from tiercel.loadtest.load.tokens import TextMaker
from tiercel.values.errors import ConfigError


class DatasetQuery(Struct, frozen=True):
    """The arguments of a dataset."""

    settings: DatasetSettings
    count: int
    seed: str
    texts: TextMaker
    words_seed: str = ""  # gives other words of the same lengths at the same times, which no prefix cache has

    def rng(self, purpose: str = "") -> random.Random:
        """Return a generator for one purpose; drawing from it does not change what other purposes draw."""
        return random.Random(f"{self.seed}/{self.settings.name}/{purpose}")  # noqa: S311 - texts, not secrets

    def words(self, purpose: str = "words") -> random.Random:
        """Return a generator as `rng` does, for the words of prompts; it depends on `words_seed`, too."""
        return self.rng(f"{purpose}/{self.words_seed}")

    @property
    def path(self) -> Path:
        """The dataset's file. Errors: ConfigError without one."""
        if self.settings.path is None:
            raise ConfigError("bench.dataset", f"dataset {self.settings.name} needs a path")
        return Path(self.settings.path)


Dataset = Callable[[DatasetQuery], list[Conversation]]


def single(prompt: str, input_tokens: int, output_tokens: int, recorded_s: float | None = None) -> Conversation:
    """Return a conversation with one turn."""
    return Conversation((Turn(prompt, input_tokens, output_tokens),), recorded_s)


def varied(length: int, ratio: float, rng: random.Random) -> int:
    """Return a length drawn uniformly from [length * (1 - ratio), length * (1 + ratio)], at least 1."""
    if not ratio:
        return length
    return max(1, rng.randint(round(length * (1 - ratio)), round(length * (1 + ratio))))


def read_text(path: Path) -> str:
    """Read a dataset file. Errors: ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError("bench.dataset", f"--dataset-path {path}: {exc}") from exc


def read_json(path: Path, text: str | bytes, place: str = "") -> object:
    """Decode JSON of a dataset file. Errors: ConfigError that names the file and `place`."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ConfigError("bench.dataset", f"--dataset-path {path}{place}: {exc}") from exc


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield line number and object of each line of a JSON-lines file. Errors: ConfigError."""
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        value = read_json(path, line, f" line {number}")
        if not isinstance(value, dict):
            raise ConfigError("bench.dataset", f"--dataset-path {path} line {number}: not an object")
        yield number, value


def enough(found: list[Conversation], query: DatasetQuery) -> list[Conversation]:
    """Return the first `count` conversations; fewer make a shorter run. Errors: ConfigError if there are none."""
    if not found:
        raise ConfigError("bench.dataset", f"dataset {query.settings.name}: no usable request in {query.settings.path}")
    return found[: query.count]

"""The tenants of a run, with keys, weights, arrivals, datasets and goals, from a YAML file."""

from collections import Counter as Tally
from pathlib import Path
from typing import Literal

import msgspec
import yaml
from msgspec import Struct

from tiercel.loadtest.results.record import Goals
from tiercel.values.errors import ConfigError

Process = Literal[
    "at_once", "constant", "poisson", "gamma", "on_off", "markov", "ramp_linear", "ramp_exponential", "trace"
]
DatasetName = Literal[
    "random", "sharegpt", "sonnet", "burstgpt", "custom", "prefix_repetition", "timed_trace", "multi_turn"
]


class ArrivalSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arrival process of a tenant.

    `at_once`: all requests at the start; with a limit on concurrency this is the closed loop. `gamma` with burstiness
    1 is `poisson`. `on_off`: `rate` for `on_s`, then no requests for `off_s`, in turn. `markov`: the same with
    exponentially distributed times of mean `on_s` and `off_s`. `trace`: the times of the dataset.
    """

    process: Process = "at_once"
    rate: float | None = None  # requests per second
    burstiness: float = 1.0  # shape of the gamma distribution: below 1 bursty, above 1 more regular
    on_s: float = 10.0
    off_s: float = 10.0
    start_rate: float | None = None  # of a ramp
    end_rate: float | None = None
    speed: float = 1.0  # of a trace: 2 replays it in half the time

    def __post_init__(self) -> None:
        _check_positive(rate=self.rate, burstiness=self.burstiness, on_s=self.on_s, speed=self.speed)
        _check_positive(start_rate=self.start_rate, end_rate=self.end_rate)
        if self.off_s < 0:
            raise ValueError("off_s is negative")
        if self.process in ("constant", "poisson", "gamma", "on_off", "markov") and self.rate is None:
            raise ValueError(f"{self.process} arrivals need a rate")
        if self.process.startswith("ramp") and (self.start_rate is None or self.end_rate is None):
            raise ValueError("a ramp needs start_rate and end_rate")

    def in_words(self) -> str:
        """Return the process as text for the report."""
        match self.process:
            case "at_once":
                return "all at once"
            case "constant" | "poisson":
                return f"{self.process}, {self.rate:g}/s"
            case "gamma":
                return f"gamma, {self.rate:g}/s, burstiness {self.burstiness:g}"
            case "on_off":
                return f"{self.rate:g}/s for {self.on_s:g} s, then off for {self.off_s:g} s"
            case "markov":
                return f"{self.rate:g}/s for {self.on_s:g} s, then off for {self.off_s:g} s, on average"
            case "ramp_linear" | "ramp_exponential":
                kind = self.process.removeprefix("ramp_")
                return f"{kind} ramp, {self.start_rate:g}/s to {self.end_rate:g}/s"
            case "trace":
                return f"as in the trace, {f'{self.rate:g}/s' if self.rate else f'speed {self.speed:g}'}"


class PromptLengths(Struct, frozen=True):
    """The lengths of generated prompts and their answers, in tokens."""

    input_len: int
    output_len: int
    prefix_len: int = 0


DEFAULT_LENGTHS: dict[DatasetName, PromptLengths] = {
    "random": PromptLengths(1024, 128),
    "multi_turn": PromptLengths(128, 128),
    "prefix_repetition": PromptLengths(0, 128, 256),  # its prompts are a prefix and a suffix, without own input_len
    "sonnet": PromptLengths(550, 150, 200),
}


class DatasetSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The dataset of a tenant. Lengths are in tokens; which of them apply depends on the dataset."""

    name: DatasetName = "random"
    path: str | None = None
    input_len: int | None = None  # None: the default or the recorded length, here and below
    output_len: int | None = None
    range_ratio: float = 0.0  # lengths vary uniformly by up to this fraction, up and down
    prefix_len: int | None = None
    suffix_len: int = 256
    num_prefixes: int = 10
    turns: int = 4  # of a conversation, for multi_turn
    think_s: float = 1.0  # mean pause before the next turn

    def __post_init__(self) -> None:
        counts = {"suffix_len": self.suffix_len, "num_prefixes": self.num_prefixes, "turns": self.turns}
        for name, value in {"input_len": self.input_len, "output_len": self.output_len, **counts}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is less than 1")
        if (self.prefix_len or 0) < 0 or self.think_s < 0:
            raise ValueError("prefix_len or think_s is negative")
        if not 0 <= self.range_ratio < 1:
            raise ValueError("range_ratio is not between 0 and 1 (1 excluded)")
        if self.path is None and self.name in ("sharegpt", "burstgpt", "custom", "timed_trace"):
            raise ValueError(f"dataset {self.name} needs a path")

    def lengths(self) -> PromptLengths:
        """Return the lengths of generated prompts; those that are not set are the defaults of the dataset."""
        default = DEFAULT_LENGTHS[self.name]
        return PromptLengths(
            default.input_len if self.input_len is None else self.input_len,
            default.output_len if self.output_len is None else self.output_len,
            default.prefix_len if self.prefix_len is None else self.prefix_len,
        )

    @property
    def has_own_texts(self) -> bool:
        """Whether the prompts are the texts of the file, the same for every seed."""
        return self.name in ("sharegpt", "custom") or (self.name == "multi_turn" and self.path is not None)

    def in_words(self) -> str:
        """Return the dataset as text for the report."""
        lengths = [
            f"{what} {value}" for what, value in (("input", self.input_len), ("output", self.output_len)) if value
        ]
        place = [Path(self.path).name] if self.path else []
        return ", ".join([self.name, *place, *lengths])


class TenantSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant of the run."""

    name: str
    key: str | None = None  # API key
    weight: float = 1.0
    num_prompts: int | None = None  # None: the value of --num-prompts
    max_concurrency: int | None = None
    arrivals: ArrivalSettings = msgspec.field(default_factory=ArrivalSettings)
    dataset: DatasetSettings = msgspec.field(default_factory=DatasetSettings)
    goals: Goals | None = None  # None: the goals of --goodput
    aggressor: bool = False  # True for a tenant whose load disturbs the others; --isolation does not run it alone
    extra_body: dict[str, object] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_positive(weight=self.weight, num_prompts=self.num_prompts, max_concurrency=self.max_concurrency)
        if not self.name.strip():
            raise ValueError("name is empty")


class Mix(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a tenants file."""

    tenants: list[TenantSettings]
    duration_s: float | None = None  # no request is sent after this time

    def __post_init__(self) -> None:
        _check_positive(duration_s=self.duration_s)
        if not self.tenants:
            raise ValueError("tenants is empty")
        twice = [name for name, count in Tally(tenant.name for tenant in self.tenants).items() if count > 1]
        if twice:
            raise ValueError(f"two tenants are named {twice[0]}")


def read_mix(path: Path) -> Mix:
    """Read a tenants file. Errors: ConfigError that names the field."""
    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
        return msgspec.convert(plain, Mix)
    except OSError as exc:
        raise ConfigError("bench.tenants", f"--tenants {path}: {exc.strerror}") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError("bench.tenants", f"--tenants {path} is not YAML: {' '.join(str(exc).split())}") from exc
    except msgspec.ValidationError as exc:
        raise ConfigError("bench.tenants", f"--tenants {path}: {_in_words(exc)}") from exc


def _in_words(error: msgspec.ValidationError) -> str:
    """Return msgspec's message with the field first: `tenants[0].weight: Expected float, got str`."""
    text, _, place = str(error).partition(" - at `$")
    place = place.removesuffix("`").lstrip(".")
    return f"{place}: {text}" if place else text


def _check_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} is not greater than 0")

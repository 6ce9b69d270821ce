"""The common part of `tiercel bench throughput` and `tiercel bench latency`: flags and the engine."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self

from msgspec import Struct

from tiercel.cli.console import warn
from tiercel.cli.flags import Run, flags_of, with_settings
from tiercel.settings.config import resolve
from tiercel.settings.option import Group, Option, OptionField, options_of
from tiercel.settings.settings import SETTINGS, EngineSettings
from tiercel.system.log import configure_log
from tiercel.system.openmp import adopt_engine_environment
from tiercel.values.errors import ConfigError

if TYPE_CHECKING:
    from tiercel.engine.offline import EngineFacts, OfflineEngine, OfflineRequest
    from tiercel.loadtest.load.request_list import ListedRequest

BENCHMARK = Group("Benchmark")
_OFFLINE = {*options_of(EngineSettings), "config", "served_model_name", "tokenizer"}
"""The names of the settings that have an effect without the HTTP process."""


class OfflineFlags(Struct, frozen=True, kw_only=True):
    """The flags of both verbs besides the settings."""

    temperature: Annotated[float, Option(BENCHMARK, "Sampling temperature; 0: greedy.", "VALUE", within=(0, 2))] = 0.0
    output_json: Annotated[Path | None, Option(BENCHMARK, "File to write the result to.", "FILE")] = None

    def check(self) -> None:
        """Check before the run that the result can be written. Errors: ConfigError."""
        check_output(self.output_json, "--output-json")


@dataclass(frozen=True, slots=True)
class OfflinePlan:
    """The settings of the engine, and the facts known before the model is loaded."""

    settings: EngineSettings
    model_id: str  # as the operator wrote it
    tokenizer: Path  # a folder, for datasets of texts
    max_model_len: int  # tokens: the smaller of the model's limit and --max-model-len
    vocab_size: int


class OfflineBar:
    """A progress bar on standard error, if that is a terminal. Use with `with`."""

    def __init__(self) -> None:
        # lazy: it imports httpx, which other verbs do not need
        from tiercel.cli.bench_progress import BenchProgress

        self._bar = BenchProgress(is_shown=True)

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)

    def stage(self, text: str, count: int) -> Callable[[int], None]:
        """Start a stage of `count` units; return the function to call with the number of ended units."""
        # lazy: as above
        from tiercel.loadtest.client.assignment import Progress

        self._bar.stage(text, count)
        return lambda ended: self._bar.progress(Progress(sent=count, ended=ended, failed=0, chunks=0))


def offline_command(run: Run, listing: str, own: Iterable[OptionField]) -> Callable[..., int]:
    """Return a typer command with its own flags and the settings of the engine."""
    return with_settings(run, listing, (option for name, option in SETTINGS.items() if name in _OFFLINE), flags_of(own))


def plan_offline(given: dict[str, object]) -> OfflinePlan:
    """Resolve the engine's flags, and read the facts about the model that do not need its weights.

    By default the prefix cache is off, because its hits depend on the similarity of the prompts, and there is no goal
    for the time between tokens. With an SSD tier the prefix cache stays on.
    Effects: configures the log and the environment of this process as for an engine. Errors: ConfigError.
    """
    resolved = resolve(given)
    defaults: dict[str, object] = {"tbt_goal": "0"}
    if not resolved.settings.engine.kv_disk_paths:
        defaults["enable_prefix_caching"] = "false"
    resolved = resolve({**given, **{name: value for name, value in defaults.items() if name not in resolved.given}})
    for line in resolved.warnings:
        warn(line)
    settings = resolved.settings.engine
    configure_log(
        settings.log_level if "log_level" in resolved.given else "warning",
        as_json="log_format" in resolved.given and settings.log_format == "json",
    )
    adopt_engine_environment()
    # lazy: it imports torch, which takes seconds and reads the environment
    from tiercel.cli.model_facts import read_model_facts

    facts = read_model_facts(settings)
    server = resolved.settings.server
    return OfflinePlan(
        settings=settings,
        model_id=server.served_model_names[0],
        tokenizer=Path(server.tokenizer or settings.model),
        max_model_len=min(facts.max_model_len, settings.max_model_len or facts.max_model_len),
        vocab_size=facts.vocab_size,
    )


def open_offline(plan: OfflinePlan, requests: Sequence["ListedRequest"]) -> "OfflineEngine":
    """Load the model and check the requests. Errors: ConfigError, also for the first request that does not fit."""
    # lazy: as above
    from tiercel.engine.offline import OfflineEngine
    from tiercel.values.clock import MonotonicClock

    check_requests(requests, plan.max_model_len, plan.vocab_size, "the model's limit or --max-model-len")
    engine = OfflineEngine.open(plan.settings, MonotonicClock())
    try:
        facts = engine.facts
        check_requests(requests, facts.max_model_len, facts.vocab_size, pool_limit_text(facts))
    except ConfigError:
        engine.close()
        raise
    return engine


def pool_limit_text(facts: "EngineFacts") -> str:
    """Return the limit of the KV pool on a sequence, for an error message."""
    return f"the KV pool of {facts.blocks} blocks of {facts.block_size} tokens; see --kv-cache-memory-bytes"


def check_requests(requests: Sequence["ListedRequest"], max_tokens: int, vocab_size: int, limit_name: str) -> None:
    """Check the requests. Errors: ConfigError for a request of more than `max_tokens`, or with unknown token ids."""
    for number, request in enumerate(requests, start=1):
        prompt, output = len(request.prompt_token_ids), request.output_len
        if prompt + output > max_tokens:
            raise ConfigError(
                "bench.too_long",
                f"request {number}: {prompt} tokens of input and {output} of output are {prompt + output}, "
                f"over {max_tokens}: {limit_name}",
            )
        if (largest := max(request.prompt_token_ids)) >= vocab_size:
            raise ConfigError(
                "bench.vocabulary", f"request {number}: token id {largest} is over the model's {vocab_size} tokens"
            )


def engine_requests(requests: Sequence["ListedRequest"], temperature: float) -> list["OfflineRequest"]:
    """Return the requests in the engine's form; each is generated to its full length."""
    # lazy: as above
    from tiercel.engine.offline import OfflineRequest
    from tiercel.values.request import SamplingParams, pack_tokens

    return [
        OfflineRequest(
            pack_tokens(request.prompt_token_ids),
            SamplingParams(temperature=temperature, seed=number, max_tokens=request.output_len, ignore_eos=True),
        )
        for number, request in enumerate(requests)
    ]


def check_output(path: Path | None, flag: str) -> None:
    """Check that a file can be written. Errors: ConfigError."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError("bench.output", f"{flag} {path}: expected a file in a folder that exists")

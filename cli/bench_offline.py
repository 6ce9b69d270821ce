"""What `tiercel bench throughput` and `tiercel bench latency` share: their flags, and the engine that they open."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self

from msgspec import Struct

from tiercel.cli.console import warn
from tiercel.cli.flags import Run, flags_of, with_settings
from tiercel.config import resolve
from tiercel.errors import ConfigError
from tiercel.log import configure_log
from tiercel.openmp import adopt_engine_environment
from tiercel.option import Group, Option, OptionField, options_of
from tiercel.settings import SETTINGS, EngineSettings

if TYPE_CHECKING:
    from tiercel.engine.offline import EngineFacts, OfflineEngine, OfflineRequest
    from tiercel.loadtest.load.request_list import ListedRequest

BENCHMARK = Group("Benchmark")
_ENGINE_OPTIONS = [
    option
    for name, option in SETTINGS.items()
    if name in options_of(EngineSettings) or name in ("config", "served_model_name", "tokenizer")
]
"""The settings that act without the HTTP process."""


class OfflineFlags(Struct, frozen=True, kw_only=True):
    """The flags of both verbs beside the settings."""

    temperature: Annotated[float, Option(BENCHMARK, "Sampling temperature; 0: greedy.", "VALUE", within=(0, 2))] = 0.0
    output_json: Annotated[Path | None, Option(BENCHMARK, "File to write the result to.", "FILE")] = None

    def check(self) -> None:
        """Check that the result can be written. Errors: ConfigError; better before the run than after it."""
        check_output(self.output_json, "--output-json")


@dataclass(frozen=True, slots=True)
class OfflinePlan:
    """What is known before the model is loaded."""

    settings: EngineSettings
    model_id: str  # as it was asked for
    tokenizer: Path  # a folder, for datasets with texts of their own
    max_model_len: int  # tokens: the model's, or fewer if the operator said so
    vocab_size: int


class OfflineBar:
    """A bar on standard error while a verb runs, where that is a terminal. Use with `with`."""

    def __init__(self) -> None:
        # lazy: httpx comes with it, which other verbs need not wait for
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
        """A new stage; the result hears how many of `count` have ended."""
        # lazy: as above
        from tiercel.loadtest.client.assignment import Progress

        self._bar.stage(text, count)
        return lambda ended: self._bar.progress(Progress(sent=count, ended=ended, failed=0, chunks=0))


def offline_command(run: Run, listing: str, own: Iterable[OptionField]) -> Callable[..., int]:
    """Return a typer command with flags of its own and every setting that the engine acts on."""
    return with_settings(run, listing, _ENGINE_OPTIONS, flags_of(own))


def plan_offline(given: dict[str, object]) -> OfflinePlan:
    """Resolve the engine's flags, and read what can be known of the model without its weights.

    The prefix cache is off unless it, or an SSD tier that needs it, was asked for: it would measure how alike the
    prompts are. There is no goal between tokens unless one was asked for: nobody reads along.
    Effects: this process computes and logs as an engine does. Errors: ConfigError.
    """
    resolved = resolve(given)
    otherwise: dict[str, object] = {"tbt_goal": "0"}
    if not resolved.settings.engine.kv_disk_paths:
        otherwise["enable_prefix_caching"] = "false"
    resolved = resolve({**given, **{name: value for name, value in otherwise.items() if name not in resolved.given}})
    for line in resolved.warnings:
        warn(line)
    settings = resolved.settings.engine
    configure_log(
        settings.log_level if "log_level" in resolved.given else "warning",
        settings.log_format if "log_format" in resolved.given else "console",
    )
    adopt_engine_environment()
    # lazy: it loads torch, which takes seconds and reads the environment
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
    """Load the model. Errors: ConfigError, also for the first request that this engine cannot take."""
    # lazy: as above
    from tiercel.clock import MonotonicClock
    from tiercel.engine.offline import OfflineEngine

    check_requests(requests, plan.max_model_len, plan.vocab_size, "the model's limit or --max-model-len")
    engine = OfflineEngine.open(plan.settings, MonotonicClock())
    try:
        facts = engine.facts
        check_requests(requests, facts.max_model_len, facts.vocab_size, pool_in_words(facts))
    except ConfigError:
        engine.close()
        raise
    return engine


def pool_in_words(facts: "EngineFacts") -> str:
    """What bounds a sequence when its KV pool does."""
    return f"what the KV pool of {facts.blocks} blocks of {facts.block_size} tokens holds; see --kv-cache-memory-bytes"


def check_requests(requests: Sequence["ListedRequest"], most_tokens: int, vocab_size: int, what: str) -> None:
    """Errors: ConfigError for a request that is longer than `most_tokens`, or has token ids the model does not know."""
    for number, request in enumerate(requests, start=1):
        prompt, output = len(request.prompt_token_ids), request.output_len
        if prompt + output > most_tokens:
            raise ConfigError(
                "bench.too_long",
                f"request {number}: {prompt} tokens of input and {output} of output are {prompt + output}, "
                f"over {most_tokens}: {what}",
            )
        if (largest := max(request.prompt_token_ids)) >= vocab_size:
            raise ConfigError(
                "bench.vocabulary", f"request {number}: token id {largest} is over the model's {vocab_size} tokens"
            )


def asked_of(requests: Sequence["ListedRequest"], temperature: float) -> list["OfflineRequest"]:
    """Requests as the engine takes them: each goes on to its full length."""
    # lazy: as above
    from tiercel.engine.offline import OfflineRequest
    from tiercel.request import SamplingParams, pack_tokens

    return [
        OfflineRequest(
            pack_tokens(request.prompt_token_ids),
            SamplingParams(temperature=temperature, seed=number, max_tokens=request.output_len, ignore_eos=True),
        )
        for number, request in enumerate(requests)
    ]


def check_output(path: Path | None, flag: str) -> None:
    """Errors: ConfigError when a file cannot be written there; better known before the run than after."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError("bench.output", f"{flag} {path}: expected a file in a folder that exists")

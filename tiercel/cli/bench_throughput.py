"""`tiercel bench throughput`: measure the throughput of the engine without HTTP."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec.structs import asdict

from tiercel.cli.bench_offline import (
    BENCHMARK,
    OfflineBar,
    OfflineFlags,
    OfflinePlan,
    check_output,
    engine_requests,
    offline_command,
    open_offline,
    plan_offline,
)
from tiercel.settings.option import Option, OptionField, flag_name, options_of, read_options
from tiercel.values.errors import ConfigError

if TYPE_CHECKING:
    from tiercel.loadtest.load.request_list import ListedRequest

_DEFAULT_PROMPTS = 1000
_NOT_OFFLINE = ("multi_turn_num_turns", "multi_turn_think_sec")


class ThroughputFlags(OfflineFlags, frozen=True, kw_only=True):
    """The flags of `bench throughput` besides the settings and the dataset."""

    num_prompts: Annotated[
        int | None, Option(BENCHMARK, "Requests; default: 1000, or all of a file.", "COUNT", within=(1, 10**9))
    ] = None
    requests: Annotated[Path | None, Option(BENCHMARK, "File of requests, as JSON lines.", "FILE")] = None
    save_requests: Annotated[
        Path | None, Option(BENCHMARK, "File to write the requests to, to run them on another engine.", "FILE")
    ] = None
    num_warmups: Annotated[
        int, Option(BENCHMARK, "Requests before the measurement, with other tokens.", "COUNT", within=(0, 10**9))
    ] = 1


def bench_throughput_command(listing: str) -> Callable[..., int]:
    """Return the command with its own flags, the dataset flags of `bench serve` and the flags of the engine."""
    own = [*options_of(ThroughputFlags).values(), *_dataset_options().values()]
    return offline_command(bench_throughput, listing, own)


def bench_throughput(given: dict[str, Any]) -> int:
    """Measure the throughput of the engine without HTTP.

    Submits all requests at once and waits for the last. Every answer has
    exactly the requested length. With --load-format dummy a folder with only a
    config.json is sufficient. --save-requests writes the requests, to run them
    on another engine. --help=all lists all flags.
    """
    # lazy: httpx and tokenizers, which other verbs do not need
    from tiercel.cli.offline_output import show_throughput, throughput_result, write_result
    from tiercel.loadtest.load.request_list import draw_like, read_requests, write_requests

    own = read_options(
        ThroughputFlags, {name: given.pop(name) for name in options_of(ThroughputFlags) if name in given}
    )
    dataset = {name: given.pop(name) for name in _dataset_options() if name in given}
    own.check()
    check_output(own.save_requests, "--save-requests")
    listed = None
    if own.requests is not None:
        for name in dataset:
            raise ConfigError(
                "bench.flag", f"{flag_name(name)}: cannot be combined with --requests, whose file defines the requests"
            )
        listed = read_requests(own.requests)[: own.num_prompts]
    plan = plan_offline(given)
    requests = listed or _draw(plan, dataset, own.num_prompts or _DEFAULT_PROMPTS)
    if own.save_requests is not None:
        write_requests(own.save_requests, requests)
    warm = draw_like(requests[: own.num_warmups], plan.settings.seed, plan.vocab_size)
    with open_offline(plan, requests) as engine, OfflineBar() as bar:
        if warm:
            engine.run(engine_requests(warm, own.temperature), bar.stage("warming up", len(warm)))
        run = engine.run(engine_requests(requests, own.temperature), bar.stage("running", len(requests)))
        facts = engine.facts
    result = throughput_result(plan, facts, requests, own.temperature, run)
    show_throughput(result)
    if own.output_json is not None:
        write_result(own.output_json, result)
    return 0


def _draw(plan: OfflinePlan, dataset: dict[str, Any], count: int) -> "list[ListedRequest]":
    # lazy: as above
    from tiercel.loadtest.load.request_list import draw_requests
    from tiercel.loadtest.plan import mix_of
    from tiercel.loadtest.settings import BenchSettings

    chosen = read_options(BenchSettings, dataset)
    values = asdict(chosen)
    for name in dataset:
        value = values[name]
        if isinstance(value, int) and value < 1 and not name.endswith("prefix_len"):
            raise ConfigError("bench.flag", f"{flag_name(name)} {value}: must be at least 1")
    settings = mix_of(chosen).tenants[0].dataset
    return draw_requests(settings, count, plan.settings.seed, plan.vocab_size, plan.tokenizer)


def _dataset_options() -> dict[str, OptionField]:
    """Return the options of `bench serve` that choose a dataset."""
    # lazy: as above
    from tiercel.loadtest.settings import DATASET, BenchSettings

    return {
        name: option
        for name, option in options_of(BenchSettings).items()
        if option.option.group == DATASET and name not in _NOT_OFFLINE
    }

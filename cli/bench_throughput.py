"""`tiercel bench throughput`: all requests at once to the engine without HTTP, and how fast it was done."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from typer.models import OptionInfo

from tiercel.cli.bench_offline import (
    OUTPUT_JSON,
    TEMPERATURE,
    OfflineBar,
    OfflinePlan,
    asked_of,
    check_output,
    offline_command,
    open_offline,
    own_flag,
    plan_offline,
)
from tiercel.cli.bench_serve import bench_serve_command
from tiercel.errors import ConfigError

if TYPE_CHECKING:
    from tiercel.loadtest.load.request_list import ListedRequest

_OWN = (
    own_flag("num_prompts", int | None, None, "Requests. [dim]\\[1000; of a file all][/dim]", "COUNT", least=1),
    own_flag("requests", Path | None, None, "Ask what this file says: JSON lines.", "FILE"),
    own_flag("save_requests", Path | None, None, "Write such a file, for a peer to be asked the same.", "FILE"),
    own_flag("num_warmups", int, 1, "Requests before the clock starts, of other tokens.", "COUNT", least=0),
    TEMPERATURE,
    OUTPUT_JSON,
)
_DEFAULT_PROMPTS = 1000
_NOT_OFFLINE = ("random_batch_size", "multi_turn_num_turns", "multi_turn_think_sec")


def bench_throughput_command(shown: str) -> Callable[..., int]:
    """The command: flags of its own, those that choose a dataset in `bench serve`, and the engine's."""
    return offline_command(bench_throughput, shown, [*_OWN, *_dataset_flags().values()])


def bench_throughput(given: dict[str, Any]) -> int:
    """Measure the throughput of the engine without HTTP.

    Hands over all requests at once and waits for the last. Every answer has
    exactly the length that was asked for, whatever the model says. A folder
    with nothing but a config.json will do with --load-format dummy, and
    --save-requests writes the very list for a peer. --help=all lists all flags.
    """
    # lazy: httpx and tokenizers, which other verbs need not wait for
    from tiercel.cli.offline_output import show_throughput, throughput_result, write_result
    from tiercel.loadtest.load.request_list import draw_like, read_requests, write_requests

    own: dict[str, Any] = {flag.name: given.pop(flag.name, flag.default) for flag in _OWN}
    dataset = {name: given.pop(name) for name in _dataset_flags() if name in given}
    check_output(own["output_json"], "--output-json")
    check_output(own["save_requests"], "--save-requests")
    listed = None
    if own["requests"] is not None:
        for name in dataset:
            raise ConfigError("bench.flag", f"--{name.replace('_', '-')}: with --requests the file says what is asked")
        listed = read_requests(own["requests"])[: own["num_prompts"]]
    plan = plan_offline(given)
    requests = listed or _draw(plan, dataset, own["num_prompts"] or _DEFAULT_PROMPTS)
    if own["save_requests"] is not None:
        write_requests(own["save_requests"], requests)
    warm = draw_like(requests[: own["num_warmups"]], plan.settings.seed, plan.vocab_size)
    with open_offline(plan, requests) as engine, OfflineBar() as bar:
        if warm:
            engine.run(asked_of(warm, own["temperature"]), bar.stage("warming up", len(warm)))
        run = engine.run(asked_of(requests, own["temperature"]), bar.stage("running", len(requests)))
        facts = engine.facts
    result = throughput_result(plan, facts, requests, own["temperature"], run)
    show_throughput(result)
    if own["output_json"] is not None:
        write_result(own["output_json"], result)
    return 0


def _draw(plan: OfflinePlan, dataset: dict[str, Any], count: int) -> "list[ListedRequest]":
    # lazy: as above
    from tiercel.loadtest.load.request_list import draw_requests
    from tiercel.loadtest.plan import mix_of
    from tiercel.loadtest.settings import BenchSettings

    for name, value in dataset.items():
        if isinstance(value, int) and value < 1 and not name.endswith("prefix_len"):
            raise ConfigError("bench.flag", f"--{name.replace('_', '-')} {value}: must be at least 1")
    settings = mix_of(BenchSettings(**dataset)).tenants[0].dataset
    return draw_requests(settings, count, plan.settings.seed, plan.vocab_size, plan.tokenizer)


def _dataset_flags() -> dict[str, inspect.Parameter]:
    """Those of `bench serve` that choose a dataset; None where one is not given."""
    found: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(bench_serve_command()).parameters.items():
        kind, option = get_args(parameter.annotation)
        assert isinstance(option, OptionInfo)
        if option.rich_help_panel == "Dataset" and name not in _NOT_OFFLINE:
            found[name] = parameter.replace(default=None, annotation=Annotated[kind | None, option])
    return found

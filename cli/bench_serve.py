"""`tiercel bench serve`: load an OpenAI-compatible server, its flags made from the one table in `loadtest.settings`."""

import asyncio
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape
from typer.models import OptionInfo

from tiercel.cli.console import warn

if TYPE_CHECKING:
    from tiercel.loadtest.results.record import RunResult
    from tiercel.loadtest.settings import BenchSettings, Flag

_HARMLESS = {
    "--trust-remote-code": (False, "no code of a model is ever run here"),
    "--plot-timeline": (False, "`tiercel bench report` draws the result file"),
    "--tokenizer-mode": (True, "the tokenizer.json is what counts"),
}


def bench_serve_command() -> Callable[..., int]:
    """The command with all its flags."""
    # lazy: httpx and tokenizers, which other verbs need not wait for
    from tiercel.loadtest.settings import BenchSettings, Flag

    def serve(**given: Any) -> int:  # typer hands over what the signature below says
        return _run(BenchSettings(**given))

    defaults = BenchSettings()
    parameters: list[inspect.Parameter] = []
    for name, hint in get_type_hints(BenchSettings, include_extras=True).items():
        kind, flag = get_args(hint)
        assert isinstance(flag, Flag)
        default = getattr(defaults, name)
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[kind, _option(name, kind, flag, default)],
            )
        )
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__doc__ = """Load a server and report latency, throughput, goodput and fairness.

    Works against any OpenAI-compatible server.
    """
    return serve


def spread(words: Sequence[str], warnings: list[str]) -> Iterator[str]:
    """Flags as load-test users type them, turned into what typer reads.

    `--goodput ttft:500 tpot:60` becomes the flag twice, `--num_prompts` becomes `--num-prompts`; a flag that does
    nothing here is dropped and adds a line to `warnings`.
    """
    # lazy: as above
    from tiercel.loadtest.settings import BenchSettings, flag_name

    many = {
        flag_name(name)
        for name, hint in get_type_hints(BenchSettings, include_extras=True).items()
        if get_args(hint)[1].many
    }
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, has_value, value = word.partition("=")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        if flag in _HARMLESS:
            takes_value, why = _HARMLESS[flag]
            if takes_value and not has_value and rest:
                rest.pop(0)
            warnings.append(f"{flag}: {why}")
        elif flag in many and not has_value:
            while rest and not rest[0].startswith("-"):
                yield from (flag, rest.pop(0))
        else:
            yield f"{flag}{has_value}{value}"


def _option(name: str, kind: object, flag: "Flag", default: object) -> OptionInfo:
    text = f"{default:g}" if isinstance(default, float) else str(default)
    shown = "" if default in (None, [], False) else f" [dim]\\[{escape(text)}][/dim]"
    choices = "|".join(str(choice) for choice in _choices(kind))
    return typer.Option(
        f"--{name.replace('_', '-')}",
        help=f"{flag.help}{shown}",
        metavar=None if kind is bool else flag.metavar or choices,
        rich_help_panel=flag.panel,
        show_default=False,
    )


def _choices(kind: object) -> tuple[object, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(choice for part in get_args(kind) for choice in _choices(part))


def run_once(settings: "BenchSettings") -> "RunResult":
    """One load test with its progress bar; its command is this process's."""
    # lazy: no other verb needs the load test
    from tiercel.cli.bench_progress import BenchProgress
    from tiercel.clock import MonotonicClock
    from tiercel.config import bench_api_key
    from tiercel.loadtest.bench import run_bench

    date = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    api_key = settings.api_key or bench_api_key()
    with BenchProgress(is_shown=not settings.disable_tqdm) as progress:
        return asyncio.run(run_bench(settings, command_line(), api_key, MonotonicClock(), date, progress))


def _run(settings: "BenchSettings") -> int:
    # lazy: as above
    from tiercel.loadtest.report.drawing import check_drawing
    from tiercel.loadtest.report.report import write_report
    from tiercel.loadtest.report.summary import summary
    from tiercel.loadtest.results.result_file import write_result
    from tiercel.loadtest.settings import percentiles

    if settings.report:
        check_drawing()  # before the run rather than after it
    result = run_once(settings)
    print(summary(result, settings.percentile_metrics, percentiles(settings.metric_percentiles)))
    if settings.save_result or settings.save_detailed or settings.append_result:
        path = _result_path(settings, result)
        write_result(result, path, append=settings.append_result)
        print(f"result: {path}", file=sys.stderr)
    if settings.report:
        print(f"report: {write_report(result, Path(settings.report))}", file=sys.stderr)
    if result.client.saturated:
        warn(f"the client is saturated: {result.client.reason}")
    return 0 if result.completed else 1


def _result_path(settings: "BenchSettings", result: "RunResult") -> Path:
    """vLLM's name for the file, unless one is given."""
    concurrency = f"-concurrency{settings.max_concurrency}" if settings.max_concurrency else ""
    label = settings.label or settings.backend
    name = f"{label}-{result.request_rate}qps{concurrency}-{result.model_id.rsplit('/', 1)[-1]}-{result.date}.json"
    return Path(settings.result_dir or ".") / (settings.result_filename or name)


def command_line() -> list[str]:
    """How this process was called, without secrets."""
    return ["tiercel", *without_keys(sys.argv[1:])]


def without_keys(words: Sequence[str]) -> list[str]:
    """The command line for the record, without secrets."""
    kept: list[str] = []
    is_secret = False
    for word in words:
        flag, has_value, _ = word.partition("=")
        if is_secret and not word.startswith("--"):
            kept.append("***")
            continue
        is_secret = flag in ("--api-key", "--header")
        kept.append(f"{flag}=***" if is_secret and has_value else word)
        is_secret = is_secret and not has_value
    return kept

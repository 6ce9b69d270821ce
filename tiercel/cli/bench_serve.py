"""`tiercel bench serve`: load an OpenAI-compatible server. Its flags are declared in `loadtest.settings`."""

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercel.cli.console import warn
from tiercel.cli.flags import flags_of, make_command
from tiercel.settings.option import options_of, read_options
from tiercel.values.errors import ConfigError

if TYPE_CHECKING:
    from tiercel.loadtest.results.record import RunResult
    from tiercel.loadtest.settings import BenchSettings

_IGNORED = {  # flags of vLLM without effect: whether each takes a value, and the reason
    "--trust-remote-code": (False, "code of a model is never run"),
    "--plot-timeline": (False, "`tiercel bench report` draws the result file"),
    "--tokenizer-mode": (True, "tokens are counted with tokenizer.json"),
}
_REFUSED = {"--random-batch-size": "every request has one prompt; raise --num-prompts or --request-rate instead"}


def bench_serve_command() -> Callable[..., int]:
    """Return the command with all its flags."""
    # lazy: httpx and tokenizers, which other verbs do not need
    from tiercel.loadtest.settings import BenchSettings

    return make_command(serve, flags_of(options_of(BenchSettings).values()))


def serve(given: dict[str, Any]) -> int:
    """Load a server and report latency, throughput, goodput and fairness.

    Works against any OpenAI-compatible server.
    """
    # lazy: as above
    from tiercel.loadtest.settings import BenchSettings

    return _run(read_options(BenchSettings, given))


def spell_out(words: Sequence[str], warnings: list[str]) -> Iterator[str]:
    """Yield the flags of vLLM's load test in the form that typer reads.

    `--goodput ttft:500 tpot:60` becomes the flag twice, `--num_prompts` becomes `--num-prompts`. A flag that has no
    effect is dropped and adds a line to `warnings`. Errors: ConfigError for a flag of vLLM that is not supported.
    """
    # lazy: as above
    from tiercel.loadtest.settings import BenchSettings

    many = {option.flag for option in options_of(BenchSettings).values() if option.option.takes_many}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, has_value, value = word.partition("=")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        if flag in _REFUSED:
            raise ConfigError("config.refused", f"{flag} is not supported: {_REFUSED[flag]}")
        if flag in _IGNORED:
            takes_value, reason = _IGNORED[flag]
            if takes_value and not has_value and rest:
                rest.pop(0)
            warnings.append(f"{flag} is ignored: {reason}")
        elif flag in many and not has_value:
            while rest and not rest[0].startswith("-"):
                yield from (flag, rest.pop(0))
        else:
            yield f"{flag}{has_value}{value}"


def run_once(settings: "BenchSettings") -> "RunResult":
    """Run one load test with a progress bar, and return its result."""
    # lazy: no other verb needs the load test
    from tiercel.cli.bench_progress import BenchProgress
    from tiercel.loadtest.bench import run_bench
    from tiercel.settings.config import bench_api_key
    from tiercel.values.clock import MonotonicClock

    date = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    api_key = settings.api_key or bench_api_key()
    with BenchProgress(is_shown=not settings.disable_tqdm) as progress:
        return asyncio.run(run_bench(settings, command_line(), api_key, MonotonicClock(), date, progress))


def _run(settings: "BenchSettings") -> int:
    # lazy: as above
    from tiercel.loadtest.report.drawing import check_drawing
    from tiercel.loadtest.report.run_page import write_report
    from tiercel.loadtest.report.summary import summary
    from tiercel.loadtest.results.result_file import write_result
    from tiercel.loadtest.settings import percentiles

    if settings.report:
        check_drawing()  # fails before the run if pictures cannot be drawn
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
    """Return the path of the result file; the default name is vLLM's."""
    concurrency = f"-concurrency{settings.max_concurrency}" if settings.max_concurrency else ""
    label = settings.label or settings.backend
    name = f"{label}-{result.request_rate}qps{concurrency}-{result.model_id.rsplit('/', 1)[-1]}-{result.date}.json"
    return Path(settings.result_dir or ".") / (settings.result_filename or name)


def command_line() -> list[str]:
    """Return the command line of this process without secrets."""
    return ["tiercel", *without_keys(sys.argv[1:])]


def without_keys(words: Sequence[str]) -> list[str]:
    """Return a command line with its keys and headers masked."""
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

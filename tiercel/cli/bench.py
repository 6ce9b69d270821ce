"""`tiercel bench`: load tests of a server, and measurements of the engine without HTTP."""

from collections.abc import Sequence

import typer

from tiercel.cli.bench_compare import bench_compare
from tiercel.cli.bench_latency import bench_latency_command
from tiercel.cli.bench_report import bench_report
from tiercel.cli.bench_serve import bench_serve_command, spell_out
from tiercel.cli.bench_sweep import bench_sweep_command
from tiercel.cli.bench_throughput import bench_throughput_command

_IGNORED_OFFLINE = "--disable-detokenize"  # a flag of vLLM


def bench_app(listing: str, *, has_flags: bool) -> typer.Typer:
    """Return the verbs under `bench`. Without `has_flags` the verbs that have many flags are left out, to save time."""
    text = "Load a server, sweep its request rate, compare results, or measure the engine without HTTP."
    app = typer.Typer(help=text, no_args_is_help=True)
    if has_flags:
        app.command("serve")(bench_serve_command())
        app.command("sweep")(bench_sweep_command())
        app.command("throughput")(bench_throughput_command(listing))
        app.command("latency")(bench_latency_command(listing))
    app.command("compare")(bench_compare)
    app.command("report")(bench_report)
    return app


def bench_words(words: Sequence[str], warnings: list[str]) -> list[str]:
    """Return the command line in the form that typer reads.

    Effects: adds a line to `warnings` for every flag without effect. Errors: ConfigError for an unsupported flag.
    """
    if words[:1] in (["serve"], ["sweep"]):
        return [*words[:1], *spell_out(words[1:], warnings)]
    if words[:1] in (["throughput"], ["latency"]) and _IGNORED_OFFLINE in words:
        warnings.append(f"{_IGNORED_OFFLINE} is ignored: outputs are never detokenised by this command")
        return [word for word in words if word != _IGNORED_OFFLINE]
    return list(words)

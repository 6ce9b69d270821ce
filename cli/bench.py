"""`tiercel bench`: the verbs of the load test."""

from collections.abc import Sequence

import typer

from cli.bench_compare import bench_compare
from cli.bench_report import bench_report
from cli.bench_serve import bench_serve_command, spread
from cli.bench_sweep import bench_sweep_command


def bench_app(*, is_wanted: bool) -> typer.Typer:
    """The verbs under `bench`; without them where another verb runs, which shall not wait for their flags."""
    app = typer.Typer(help="Load-test a server; sweep its rate; compare two results.", no_args_is_help=True)
    if is_wanted:
        app.command("serve")(bench_serve_command())
        app.command("sweep")(bench_sweep_command())
    app.command("compare")(bench_compare)
    app.command("report")(bench_report)
    return app


def bench_words(words: Sequence[str], warnings: list[str]) -> list[str]:
    """The command line as typer reads it. Effects: adds a line to `warnings` for a flag that does nothing."""
    if words[:1] not in (["serve"], ["sweep"]):
        return list(words)
    return [*words[:1], *spread(words[1:], warnings)]

"""`tiercel bench compare`: two results side by side, and the significance of each difference."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tiercel.loadtest.results.comparison import Difference
    from tiercel.loadtest.results.record import RunResult


def bench_compare(
    first: Annotated[Path, typer.Argument(help="Result file to compare with.", metavar="FIRST")],
    second: Annotated[Path, typer.Argument(help="Result file to judge.", metavar="SECOND")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> int:
    """Compare two results: second over first, with the 95 % interval of the ratio.

    The interval is a bootstrap over requests, for rates over blocks of time. A
    difference whose interval contains 1 is a tie. Intervals need results that
    were saved with --save-detailed. Of several results in a file the last is used.
    """
    # lazy: no other verb compares
    from tiercel.loadtest.results.comparison import compare, differing_settings, encode_comparison
    from tiercel.loadtest.results.result_file import read_results

    runs = read_results(first)[-1], read_results(second)[-1]
    differences = compare(*runs)
    unlike = differing_settings(*runs)
    if as_json:
        print(encode_comparison(differences, unlike).decode())
    else:
        _print(differences, runs, unlike)
    return 0


def _print(
    differences: "list[Difference]", runs: "tuple[RunResult, RunResult]", unlike: dict[str, tuple[str, str]]
) -> None:
    # lazy: no other verb prints this table
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # lazy: as above
    from tiercel.loadtest.results.comparison import ComparisonVerdict

    console = Console(highlight=False)
    for name, pair in unlike.items():
        console.print(Text(f"different {name}: {pair[0]} | {pair[1]}", style="yellow"))
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("figure", overflow="fold")
    for title, run in zip(("first", "second"), runs, strict=True):
        table.add_column(Text(run.label or title), justify="right", no_wrap=True)
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("95 % interval", no_wrap=True)
    table.add_column("", no_wrap=True)
    styles = {
        ComparisonVerdict.BETTER: "green",
        ComparisonVerdict.WORSE: "red",
        ComparisonVerdict.TIE: "dim",
        ComparisonVerdict.UNKNOWN: "dim",
    }
    for difference in differences:
        table.add_row(*_cells(difference), Text(_verdict(difference), style=styles[difference.verdict]))
    console.print(table)
    known = [difference for difference in differences if difference.spread is not None]
    console.print(
        f"{len(known)} intervals of 95 %: about one in twenty misses the true ratio by chance."
        if known
        else "No intervals: save both results with --save-detailed.",
        style="dim",
    )


def _cells(difference: "Difference") -> tuple[str, str, str, str, str]:
    # lazy: no other verb compares
    from tiercel.loadtest.report.wording import NONE, figure_words, show_ms, show_number, show_percent

    spread = difference.spread
    show, name = show_number, difference.figure
    if name.endswith("_ms"):
        show, name = show_ms, figure_words(name)
    elif name.endswith("share"):
        show = show_percent
    return (
        f"{difference.tenant}: {name}" if difference.tenant else name,
        show(difference.first),
        show(difference.second),
        NONE if difference.ratio is None else f"{difference.ratio:.3f}",
        NONE if spread is None else f"{spread.low:.3f} to {spread.high:.3f}",
    )


def _verdict(difference: "Difference") -> str:
    return difference.reason or difference.verdict.value

"""`tiercel bench compare`: compare two results, with the significance of each difference."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tiercel.cli.console import print_table

if TYPE_CHECKING:
    from tiercel.loadtest.results.comparison import Difference
    from tiercel.loadtest.results.record import RunResult


def bench_compare(
    first: Annotated[Path, typer.Argument(help="Baseline result file.", metavar="FIRST")],
    second: Annotated[Path, typer.Argument(help="Result file to compare with the baseline.", metavar="SECOND")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> int:
    """Compare two results: the ratio of second to first, with its 95 % interval.

    The interval is a bootstrap over requests; for rates, over blocks of time. A
    difference whose interval contains 1 is a tie. Intervals need results that
    were saved with --save-detailed. If a file has several results, the last is
    used.
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
    # lazy: most verbs print no table
    from rich.text import Text

    # lazy: as above
    from tiercel.loadtest.results.comparison import ComparisonVerdict

    for name, (first, second) in unlike.items():
        print(f"different {name}: {first} | {second}")
    titles = [run.label or title for title, run in zip(("first", "second"), runs, strict=True)]
    styles = {
        ComparisonVerdict.BETTER: "green",
        ComparisonVerdict.WORSE: "red",
        ComparisonVerdict.TIE: "dim",
        ComparisonVerdict.UNKNOWN: "dim",
    }
    rows = [
        (*_cells(difference), Text(_verdict(difference), style=styles[difference.verdict]))
        for difference in differences
    ]
    print_table(("figure", *titles, "ratio", "95 % interval", ""), rows, right=(*titles, "ratio"))
    known = [difference for difference in differences if difference.spread is not None]
    print(
        f"{len(known)} intervals of 95 %: about one in twenty misses the true ratio by chance."
        if known
        else "No intervals: save both results with --save-detailed."
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

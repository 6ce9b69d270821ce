"""`tiercel bench report`: the report of a run from its result file."""

from pathlib import Path
from typing import Annotated

import typer

from tiercel.cli.console import warn

OUT_HELP = "Folder for the page and its pictures; default: next to the result."


def bench_report(
    result: Annotated[Path, typer.Argument(help="Result file of tiercel bench serve.", metavar="RESULT")],
    out: Annotated[Path | None, typer.Option(help=OUT_HELP, metavar="FOLDER")] = None,
) -> int:
    """Write the report of a result: one self-contained HTML page, and each picture as a PNG.

    If the file has several results (--append-result), the last one is used.
    """
    # lazy: no other verb draws
    from tiercel.loadtest.report.run_page import write_report
    from tiercel.loadtest.results.result_file import read_results

    results = read_results(result)
    if len(results) > 1:
        warn(f"{result} has {len(results)} results: the last one is used")
    print(write_report(results[-1], out or result.with_suffix(".report")))
    return 0

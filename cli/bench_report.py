"""`tiercel bench report`: the pictures of a run from its result file."""

from pathlib import Path
from typing import Annotated

import typer

from tiercel.cli.console import warn

OUT_HELP = "Folder of the page and its pictures; beside the result if left out."


def bench_report(
    result: Annotated[Path, typer.Argument(help="Result file of tiercel bench serve.", metavar="RESULT")],
    out: Annotated[Path | None, typer.Option(help=OUT_HELP, metavar="FOLDER")] = None,
) -> int:
    """Draw a result: one HTML page that needs nothing else, and every picture as a PNG.

    Of a file with several results (--append-result) the last one is drawn.
    """
    # lazy: no other verb draws
    from tiercel.loadtest.report.run_page import write_report
    from tiercel.loadtest.results.result_file import read_results

    results = read_results(result)
    if len(results) > 1:
        warn(f"{result} holds {len(results)} results: the last one is drawn")
    print(write_report(results[-1], out or result.with_suffix(".report")))
    return 0

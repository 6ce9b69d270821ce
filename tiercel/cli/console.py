"""Output to a terminal: tables on standard output, warnings and errors as single lines on standard error."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tiercel.system.standard_streams import error_stream, output_stream, say

if TYPE_CHECKING:
    from rich.text import Text

_MIN_WIDTH = 160  # characters; in a narrower terminal rich would shorten the columns of a table


def warn(line: str) -> None:
    """Print a warning."""
    say(f"tiercel: warning: {line}", error_stream())


def fail(line: str) -> None:
    """Print the error that ends the command."""
    say(f"tiercel: error: {line}", error_stream())


def print_tables(tables: Mapping[str, Mapping[str, str]]) -> None:
    """Print rows of names and values under titles."""
    rows = [
        row for title, pairs in tables.items() for row in ((title,), *((f"  {name}", pairs[name]) for name in pairs))
    ]
    print_table(("name", "value"), rows, has_header=False)


def print_table(
    columns: Sequence[str],
    rows: "Iterable[Sequence[str | Text]]",
    *,
    right: Collection[str] = (),
    has_header: bool = True,
) -> None:
    """Print a table without lines. A row of one cell is a title. `right` names the columns that are aligned right."""
    # lazy: most verbs print no table
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=has_header, box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="dim")
    for name in columns:
        if name in right:
            table.add_column(name, justify="right", no_wrap=True)
        else:
            table.add_column(name, overflow="fold")
    for row in rows:
        style = "bold" if len(row) == 1 else ""
        table.add_row(*(Text(cell, style=style) if isinstance(cell, str) else cell for cell in row))
    console = Console(file=output_stream(), highlight=False, soft_wrap=True)
    console.width = max(console.width, _MIN_WIDTH)
    console.print(table)

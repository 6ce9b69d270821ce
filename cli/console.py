"""Output for people: tables on standard output, warnings and errors as single lines on standard error."""

import sys
from collections.abc import Mapping


def warn(line: str) -> None:
    """Print a warning."""
    print(f"tiercel: warning: {line}", file=sys.stderr)


def fail(line: str) -> None:
    """Print the error that ends the command."""
    print(f"tiercel: error: {line}", file=sys.stderr)


def print_tables(tables: Mapping[str, Mapping[str, str]]) -> None:
    """Print rows of names and values under titles."""
    # lazy: most verbs print no table
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column("what", no_wrap=True)
    table.add_column("value", overflow="fold")
    for title, rows in tables.items():
        table.add_row(Text(title, style="bold"), "")
        for name, value in rows.items():
            table.add_row(f"  {name}", Text(value))
    Console(highlight=False, soft_wrap=True).print(table)

"""`tiercel kv`: inspect, verify and delete the files of the SSD tier. Works beside a running daemon."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tiercel.cli.console import fail, print_tables
from tiercel.values.units import show_bytes

if TYPE_CHECKING:
    from tiercel.device.volume_survey import FolderFacts

Folders = Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Folder of --kv-disk-path.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON array.")]

_AGES = ((86_400, "days"), (3_600, "hours"), (60, "minutes"))


def kv_app() -> typer.Typer:
    """Return the verbs under `kv`."""
    app = typer.Typer(help="Inspect, verify and delete the KV blocks on disk.", no_args_is_help=True)
    app.command("inspect")(inspect)
    app.command("verify")(verify)
    app.command("purge")(purge)
    return app


def inspect(folders: Folders, as_json: AsJson = False) -> int:
    """Show the format, slots, sizes, age, journal state and owner process of each folder."""
    # lazy: no other verb needs it
    from tiercel.device.volume_survey import view_folder

    with ExitStack() as closing:
        facts = [view_folder(folder, closing).facts() for folder in folders]
    if as_json:
        print(json.dumps([asdict(found) for found in facts]))
    else:
        _print({found.folder: _rows(found) for found in facts})
    return 0


def verify(folders: Folders, as_json: AsJson = False) -> int:
    """Read every block and compare it with its checksum. Exit code 1 if a block is torn.

    The server treats a torn block as a cache miss; many torn blocks indicate a failing disk.
    """
    # lazy: no other verb needs it
    from tiercel.device.volume_survey import view_folder

    with ExitStack() as closing:
        found = {str(folder): view_folder(folder, closing).check() for folder in folders}
    if as_json:
        print(json.dumps([{"folder": folder, **asdict(counts)} for folder, counts in found.items()]))
    else:
        _print(
            {
                folder: {"good": f"{counts.good:,}", "empty": f"{counts.empty:,}", "torn": _list(counts.torn)}
                for folder, counts in found.items()
            }
        )
    torn = sum(len(counts.torn) for counts in found.values())
    if torn:
        fail(f"{torn} {'block is' if torn == 1 else 'blocks are'} torn")
    return 1 if torn else 0


def purge(folders: Folders, as_json: AsJson = False) -> int:
    """Delete the blocks in each folder. Fails if a running daemon uses one of the folders."""
    # lazy: no other verb needs it
    from tiercel.device.volume_survey import purge_folder

    freed = {str(folder): purge_folder(folder) for folder in folders}
    if as_json:
        print(json.dumps([{"folder": folder, "freed_bytes": count} for folder, count in freed.items()]))
    else:
        _print({folder: {"freed": show_bytes(count)} for folder, count in freed.items()})
    return 0


def _print(tables: Mapping[str, Mapping[str, str]]) -> None:
    """Print a table per folder. The path is a value, because titles do not wrap."""
    print_tables(
        {f"Folder {number}": {"path": folder, **rows} for number, (folder, rows) in enumerate(tables.items(), 1)}
    )


def _rows(facts: "FolderFacts") -> dict[str, str]:
    now_s = time.time()
    return {
        "format": f"{facts.format_version}",
        "fingerprint": facts.fingerprint,
        "stripe": f"{facts.stripe + 1} of {facts.stripes}",
        "blocks": f"{facts.used:,} of {facts.slots:,} used, {show_bytes(facts.block_bytes)} each",
        "size": f"{show_bytes(facts.file_bytes)}, {show_bytes(facts.disk_bytes)} on disk",
        "created": f"{_age(now_s - facts.created_s)} ago, opened {facts.opens:,} times",
        "last written": f"{_age(now_s - facts.written_s)} ago",
        "journal": facts.journal,
        "in use": "no" if facts.holder is None else f"by the daemon with pid {facts.holder or 'unknown'}",
    }


def _age(seconds: float) -> str:
    for unit_s, name in _AGES:
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{max(0.0, seconds):.0f} seconds"


def _list(slots: Sequence[int], max_shown: int = 20) -> str:
    shown = " ".join(map(str, slots[:max_shown]))
    return f"{len(slots):,}{f': slots {shown}' if slots else ''}{' ...' if len(slots) > max_shown else ''}"

"""`tiercel serve` with the engine of `faulty_engine.py`. The command line is that of `tiercel serve`."""

import sys

import typer
from typer.main import get_command

from tiercel.cli.arguments import translate
from tiercel.cli.flags import COMMON, with_settings
from tiercel.server.launch import serve as launch
from tiercel.settings.config import resolve

ENGINE = (sys.executable, "-m", "tests.faults.faulty_engine")


def serve(given: dict[str, object]) -> int:
    """Serve a model whose engines crash as planned."""
    resolved = resolve(given)
    return launch(resolved.settings, origin=resolved, command=ENGINE)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(with_settings(serve, COMMON))
    sys.exit(get_command(app).main(args=translate(sys.argv[1:], []), standalone_mode=False))

"""HTML pages from the templates of this room. Everything that a template inserts is escaped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tiercel.loadtest.report.drawing import Chart
from tiercel.values.errors import ConfigError

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)

KeyFigure = tuple[str, str, str]
"""One of the few large numbers of a page: name, value, and a smaller line below."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of numbers. The first cell of a row names it."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    marked: int | None = None  # the row that is set off from the others


def write_page(template: str, content: Mapping[str, object], charts: Sequence[Chart], folder: Path, name: str) -> Path:
    """Write a page and its charts as PNG files into `folder`. Return the page's path.

    Errors: ConfigError when the folder cannot be written.
    """
    text = _TEMPLATES.get_template(template).render(content)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            (folder / f"{chart.name}.png").write_bytes(chart.png)
        (folder / name).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError("bench.report", f"{folder}: {exc.strerror}") from exc
    return folder / name

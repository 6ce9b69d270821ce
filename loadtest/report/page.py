"""The parts of a page: everything that comes from outside is escaped here."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from tiercel.loadtest.report.drawing import Picture
from tiercel.loadtest.report.stylesheet import STYLESHEET

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def whole_page(title: str, body: Iterable[str]) -> str:
    """One document that needs nothing else: its policy forbids scripts and every other file."""
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>\n<style>{STYLESHEET}</style>\n</head>\n<body>\n<main>",
            *body,
            "</main>\n</body>\n</html>\n",
        ]
    )


def header(title: str, lead: str) -> str:
    """The name of the page and one line under it."""
    return f'<header>\n<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n</header>'


def key_figures(figures: Sequence[tuple[str, str, str]]) -> str:
    """The few large numbers: name, value, and a smaller line below."""
    cells = [
        f"<div{_class('first', place == 0)}><dt>{escape(name)}</dt>"
        f"<dd>{escape(value)}<small>{escape(below)}</small></dd></div>"
        for place, (name, value, below) in enumerate(figures)
    ]
    return f'<dl class="keys">{"".join(cells)}</dl>'


def notes(lines: Sequence[str]) -> str:
    """What the reader must know, if anything."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="notes">{items}</ul>' if lines else ""


def section(title: str, parts: Iterable[str]) -> str:
    """A heading and what belongs to it; nothing where nothing does."""
    body = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>" if body else ""


def paragraph(text: str) -> str:
    """A quiet line."""
    return f'<p class="quiet">{escape(text)}</p>' if text else ""


def pictures(drawn: Sequence[Picture]) -> str:
    """Pictures two abreast where there is room."""
    return f'<div class="pictures">\n{"".join(map(_figure, drawn))}</div>' if drawn else ""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "", marked: int | None = None) -> str:
    """A table of numbers; it scrolls sideways on its own where it is too wide. `marked`: the row that stands out."""
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(
        f"<tr{_class('good', place == marked)}>"
        f'<th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for place, row in enumerate(rows)
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption or columns[0])}">'
        f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def facts(groups: Mapping[str, Mapping[str, str]]) -> str:
    """Names and values under headings, side by side where there is room."""
    blocks = [
        f'<div><h3>{escape(title)}</h3><table class="facts"><tbody>'
        + "".join(
            f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows.items()
        )
        + "</tbody></table></div>"
        for title, rows in groups.items()
        if rows
    ]
    return f'<div class="tables">{"".join(blocks)}</div>' if blocks else ""


def command_line(words: Sequence[str]) -> str:
    """The command that made it, ready to be copied."""
    return f"<pre><code>{escape(' '.join(words))}</code></pre>" if words else ""


def _figure(picture: Picture) -> str:
    drawing = picture.svg.replace("<svg ", f'<svg role="img" aria-label="{escape(picture.alt)}" ', 1)
    return (
        f'<figure id="{escape(picture.name)}"><h3>{escape(picture.title)}</h3>'
        f"<figcaption>{escape(picture.caption)}</figcaption>{drawing}</figure>\n"
    )


def _class(name: str, applies: bool) -> str:
    return f' class="{name}"' if applies else ""

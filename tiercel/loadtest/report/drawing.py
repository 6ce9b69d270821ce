"""Charts drawn without a screen in one style, each as PNG and as SVG that follows the colours of the page.

matplotlib is loaded when the first chart is drawn; its global settings are restored afterwards.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiercel.values.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import RcKeyType

INK = "#1f2429"
MUTED = "#5f6874"
SOFT = "#99a1ab"
FAINT = "#e3e6ea"
ACCENT = "#b9420e"

WIDTH_PT = 390
HEIGHT_PT = 222

# The colours of a drawing and the variables of the page that replace them; a drawing must have no other colour.
VARIABLES = {INK: "--ink", MUTED: "--muted", SOFT: "--soft", FAINT: "--faint", ACCENT: "--accent"}

_STYLE: "dict[RcKeyType, object]" = {
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "svg.fonttype": "none",
    "svg.hashsalt": "tiercel",
}


@dataclass(frozen=True, slots=True)
class Chart:
    """One drawing in both formats. `alt` describes it in words."""

    name: str  # name of its PNG file, without the ending
    title: str
    caption: str
    alt: str
    svg: str
    png: bytes


def check_drawing() -> None:
    """Check that charts can be drawn. Errors: ConfigError if matplotlib is not installed."""
    with drawing_style():
        pass


@contextmanager
def drawing_style() -> Iterator[None]:
    """Set the style within the `with`. Errors: ConfigError if matplotlib is not installed."""
    try:
        # lazy: heavy, and an extra
        import matplotlib
    except ImportError as exc:
        raise ConfigError("bench.matplotlib", "charts need matplotlib: pip install 'tiercel[bench]'") from exc
    with matplotlib.rc_context(_STYLE):
        yield


def new_figure(height_pt: float = HEIGHT_PT, width_pt: float = WIDTH_PT) -> "Figure":
    """Return an empty figure. Call within `drawing_style`."""
    # lazy: heavy, and an extra
    from matplotlib.figure import Figure

    return Figure(figsize=(width_pt / 72, height_pt / 72), layout="constrained")


def rows_of(figure: "Figure", count: int) -> "list[Axes]":
    """Return `count` axes above each other with one time scale."""
    grid = figure.subplots(count, 1, sharex=True, squeeze=False)
    return [grid[row][0] for row in range(count)]


def finish(figure: "Figure", name: str, title: str, caption: str, alt: str) -> Chart:
    """Return the figure as a `Chart`. Call within `drawing_style`."""
    # lazy: heavy, and an extra
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    vector, pixels = io.StringIO(), io.BytesIO()
    figure.set_facecolor("none")
    for axes in figure.axes:
        axes.set_facecolor("none")
    FigureCanvasSVG(figure).print_svg(vector, metadata={"Date": None, "Creator": None})
    figure.set_facecolor("white")
    figure.set_layout_engine("none")  # the same layout, which takes half of the time of a drawing
    FigureCanvasAgg(figure)
    figure.savefig(pixels, format="png", dpi=200, metadata={"Software": None})
    return Chart(name, title, caption, alt, _inline(vector.getvalue(), name), pixels.getvalue())


def _inline(svg: str, name: str) -> str:
    """Return the bare <svg> element, with the colours and font of the page and with ids that start with `name`."""
    body = svg[svg.index("<svg") :].strip()
    body = re.sub(r"\s*<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\sid="([^"]+)"', rf' id="{name}-\1"', body)
    body = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", body)
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r"font-family: [^;\"]*", "font-family: var(--font)", body)
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    opening, rest = body.split(">", 1)
    box = re.search(r'viewBox="[^"]+"', opening)
    assert box is not None
    return f'<svg {box[0]} xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">{rest}'

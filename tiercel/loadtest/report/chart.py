"""The kinds of charts in a report, independent of load tests: their inputs are numbers and words."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiercel.loadtest.report.drawing import ACCENT, HEIGHT_PT, INK, MUTED, SOFT, new_figure, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Show = Callable[[float], str]

_ROW_PT = 72
_AXIS_PT = 34
_PERCENTS = (1, 10, 25, 50, 75, 90, 99)
_LOG_FROM = 20.0  # a ratio of highest to lowest value from which the scale is logarithmic
_NEAR = 0.09  # labels closer than this share of the axis are moved apart


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution by its percentiles 0 to 100."""

    label: str
    values: Sequence[float]
    is_main: bool = True


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over time. None: unknown at that time."""

    at_s: Sequence[float]
    values: Sequence[float | None]
    label: str
    is_main: bool = True
    is_stepped: bool = True


@dataclass(frozen=True, slots=True)
class ChartRow:
    """Curves that share one scale."""

    title: str
    curves: Sequence[Curve]
    top: float | None = None  # end of the scale; None: the largest value


@dataclass(frozen=True, slots=True)
class Span:
    """One line of a range chart, with an optional goal."""

    label: str
    low: float
    high: float
    goal: float | None = None


def quantile_chart(lines: Sequence[Quantiles], show: Show) -> "Figure":
    """Draw distributions by percentile on a logit scale, which stretches the tails."""
    figure = new_figure()
    axes = figure.subplots()
    percents = range(1, 100)
    known = [value for line in lines for value in line.values[1:100]]
    _scale(axes, min(known), max(known), show)
    places = [_logit(percent) for percent in percents]
    for line in sorted(lines, key=lambda line: line.is_main):
        values = [line.values[percent] for percent in percents]
        axes.plot(places, values, color=_colour(line.is_main), linewidth=2.0 if line.is_main else 1.6)
        axes.plot([_logit(50), _logit(99)], [values[49], values[98]], "o", color=_colour(line.is_main), markersize=4)
    axes.set_xticks([_logit(percent) for percent in _PERCENTS], [f"{percent}" for percent in _PERCENTS])
    axes.set_xlabel("percentile of the samples")
    axes.set_xlim(_logit(1) - 0.15, _logit(99) + 0.1)
    main = next(line for line in lines if line.is_main)
    _note(axes, _logit(50), main.values[50], f"median {show(main.values[50])}", (-3, 7), "right", ACCENT)
    ends = [(line.values[99], f"{line.label}p99 {show(line.values[99])}", _colour(line.is_main)) for line in lines]
    _end_labels(axes, ends, _logit(99) + 0.1)
    return figure


def rows_chart(rows: Sequence[ChartRow], show: Show, time_label: str = "seconds since the run began") -> "Figure":
    """Draw rows of curves above each other over one time scale, each with its title above its left end."""
    single = len(rows) == 1
    figure = new_figure(HEIGHT_PT if single else _ROW_PT * len(rows) + _AXIS_PT)
    all_axes = rows_of(figure, len(rows))
    ends = [at_s for row in rows for curve in row.curves for at_s in curve.at_s[-1:]]
    for axes, row in zip(all_axes, rows, strict=True):
        _draw_row(axes, row, show, max(ends, default=1.0), 5 if single else 3)
    for axes in all_axes[:-1]:
        axes.tick_params(axis="x", length=0)
    all_axes[-1].set_xlabel(time_label)
    return figure


def range_chart(spans: Sequence[Span], show: Show) -> "Figure":
    """Draw a line for each span from low to high; a goal is a tick across the line."""
    figure = new_figure(30 * len(spans) + 58)
    axes = figure.subplots()
    axes.grid(visible=False)
    highest = max(max(span.high, span.goal or 0) for span in spans)
    _scale(axes, min(span.low for span in spans), highest, show, is_vertical=False)
    for place, span in enumerate(spans):
        axes.plot([span.low, span.high], [place, place], color=SOFT, linewidth=2.2)
        axes.plot([span.low], [place], "o", color=SOFT, markersize=5)
        axes.plot([span.high], [place], "o", color=ACCENT, markersize=6)
        end = max(span.high, span.goal or 0)
        _note(axes, end, place, show(span.high), (8, 0), "left", ACCENT, "center")
        if span.goal is not None:
            axes.plot([span.goal], [place], "|", color=INK, markersize=15, markeredgewidth=1.4)
    axes.set_yticks(range(len(spans)), [span.label for span in spans], color=INK)
    axes.set_ylim(len(spans) - 0.4, -0.6)
    left, right = axes.get_xlim()
    end = right * (right / left) ** 0.16 if axes.get_xscale() == "log" else right + 0.16 * (right - left)
    axes.set_xlim(left, end)
    return figure


def rate_chart(offered: Sequence[float], achieved: Sequence[float], knee: float | None, show: Show) -> "Figure":
    """Draw the achieved over the offered rate, with the line at which both are equal and the knee."""
    figure = new_figure()
    axes = figure.subplots()
    points = sorted(zip(offered, achieved, strict=True))
    top = points[-1][0]
    axes.plot([0, top], [0, top], color=SOFT, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.plot([x for x, _ in points], [y for _, y in points], "o-", color=ACCENT, markersize=4.5)
    axes.set_xlim(0, top * 1.04)
    axes.set_ylim(0, max(max(achieved), top * 0.6) * 1.12)
    _note(axes, top * 0.5, top * 0.5, "all requests good", (-6, 4), "right", MUTED)
    if knee is not None:
        good = dict(points)[knee]
        axes.plot([knee, knee], [0, good], color=INK, linewidth=1)
        axes.plot([knee], [good], "o", color=INK, markersize=6)
        _note(axes, knee, good / 2, f"knee at {show(knee)}/s", (6, 0), "left", INK, "center")
    axes.set_xlabel("requests/s offered")
    return figure


def latency_chart(offered: Sequence[float], high: Sequence[float], low: Sequence[float], show: Show) -> "Figure":
    """Draw the 99th percentile and the median of a latency over the offered rate."""
    figure = new_figure()
    axes = figure.subplots()
    _scale(axes, min(low), max(high), show)
    axes.plot(offered, low, "o-", color=SOFT, markersize=4)
    axes.plot(offered, high, "o-", color=ACCENT, markersize=4.5)
    axes.set_xlim(0, max(offered) * 1.02)
    axes.set_xlabel("requests/s offered")
    _end_labels(axes, [(high[-1], f"p99 {show(high[-1])}", ACCENT), (low[-1], f"median {show(low[-1])}", SOFT)], 0)
    return figure


def _draw_row(axes: "Axes", row: ChartRow, show: Show, end_s: float, ticks: int) -> None:
    # lazy: heavy, and an extra
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    for curve in sorted(row.curves, key=lambda curve: curve.is_main):
        values = [math.nan if value is None else value for value in curve.values]
        at_s = list(curve.at_s)
        style = "steps-post" if curve.is_stepped else "default"
        width = 1.7 if curve.is_main else 1.3
        axes.plot(at_s, values, color=_colour(curve.is_main), linewidth=width, drawstyle=style)
        if curve.is_main:
            step = "post" if curve.is_stepped else None
            axes.fill_between(at_s, values, step=step, color=ACCENT, alpha=0.09, linewidth=0)
    known = [value for curve in row.curves for value in curve.values if value is not None]
    top = row.top if row.top is not None else max(known, default=0.0) * 1.1
    axes.set_ylim(0, top or 1.0)
    axes.set_xlim(0, end_s or 1.0)
    axes.yaxis.set_major_locator(FixedLocator([0, 0.5, 1]) if row.top == 1 else MaxNLocator(ticks, min_n_ticks=2))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))
    axes.set_title(row.title, loc="left", fontsize=10, color=INK, pad=5)
    ends = [
        (known[-1], curve.label, _colour(curve.is_main))
        for curve in row.curves
        if curve.label and (known := [value for value in curve.values if value is not None])
    ]
    _end_labels(axes, ends, end_s or 1.0)


def _colour(is_main: bool) -> str:
    return ACCENT if is_main else SOFT


def _logit(percent: float) -> float:
    return math.log(percent / (100 - percent))


def _scale(axes: "Axes", low: float, high: float, show: Show, *, is_vertical: bool = True) -> None:
    """Set a linear scale from zero, or a logarithmic one for a wide range, with formatted ticks."""
    # lazy: heavy, and an extra
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    axis = axes.yaxis if is_vertical else axes.xaxis
    limit = axes.set_ylim if is_vertical else axes.set_xlim
    if low > 0 and high / low > _LOG_FROM:
        (axes.set_yscale if is_vertical else axes.set_xscale)("log")
        limit(low / 1.15, high * 1.3)
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1, 3) if math.log10(high / low) < 3 else (1,)
        axis.set_major_locator(FixedLocator([digit * 10.0**decade for decade in decades for digit in steps]))
        axis.set_minor_locator(NullLocator())
        limit(low / 1.15, high * 1.3)
    else:
        limit(0, high * 1.12 or 1.0)
        axis.set_major_locator(MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))


def _note(
    axes: "Axes",
    x: float,
    y: float,
    text: str,
    shift_pt: tuple[float, float],
    side: str,
    colour: str,
    level: str = "bottom",
) -> None:
    axes.annotate(
        text, (x, y), shift_pt, textcoords="offset points", ha=side, va=level, color=colour, fontsize=10,
        annotation_clip=False,
    )  # fmt: skip


def _end_labels(axes: "Axes", ends: Sequence[tuple[float, str, str]], x: float) -> None:
    """Draw the names of curves at their last values, moved apart where they would touch."""
    to_share = axes.transScale + axes.transLimits
    placed: list[tuple[float, str, str]] = []
    for value, text, colour in sorted(ends):
        share = float(to_share.transform((x, value))[1])
        below = placed[-1][0] if placed else -1.0
        tall = _NEAR if axes.get_position().height > 0 else 0.0
        placed.append((max(share, below + tall), text, colour))
    for share, text, colour in placed:
        axes.annotate(
            text, (1.0, share), (5, 0), xycoords="axes fraction", textcoords="offset points", ha="left", va="center",
            color=MUTED if colour == SOFT else colour, fontsize=10, annotation_clip=False,
        )  # fmt: skip

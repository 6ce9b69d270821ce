"""Numbers formatted for reports: few digits, with units."""

NONE = "\N{EN DASH}"
LATENCY_NAMES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}
_THIN = "\N{NARROW NO-BREAK SPACE}"


def show_ms(value: float | None) -> str:
    """Format milliseconds: `0.8 ms`, `142 ms`, `3.2 s`, `4.5 min`."""
    if value is None:
        return NONE
    if value < 1000:
        return f"{_digits(value)}{_THIN}ms"
    return f"{_digits(value / 1000)}{_THIN}s" if value < 120_000 else f"{_digits(value / 60_000)}{_THIN}min"


def show_s(value: float | None) -> str:
    """Format seconds as `show_ms` does."""
    return NONE if value is None else show_ms(value * 1000)


def show_number(value: float | None) -> str:
    """Format a number: `0.42`, `7.5`, `812`, `12,400`."""
    return NONE if value is None else _digits(value)


def show_percent(share: float | None) -> str:
    """Format a share from 0 to 1: `0.4 %`, `37 %`."""
    return NONE if share is None else f"{_digits(share * 100)}{_THIN}%"


def show_bytes_per_s(rate: float) -> str:
    """Format a rate: `0`, `640 B/s`, `1.2 GB/s`."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if rate >= size:
            return f"{_digits(rate / size)}{_THIN}{unit}"
    return f"{_digits(rate)}{_THIN}B/s" if rate else "0"


def show_factor(ratio: float) -> str:
    """Format a factor: `× 0.92`, `× 12`."""
    return (
        f"\N{MULTIPLICATION SIGN}{_THIN}{ratio:.2f}" if ratio < 9.995 else f"\N{MULTIPLICATION SIGN}{_THIN}{ratio:.0f}"
    )


def figure_words(figure: str) -> str:
    """Return the name of a figure for people: `p99 TTFT` for `p99_ttft_ms`."""
    statistic, _, metric = figure.removesuffix("_ms").partition("_")
    name = metric.removesuffix("_due").upper() if metric != "client_queue_time" else "client queue"
    return f"{statistic} {name}{' from due' if metric.endswith('_due') else ''}"


def _digits(value: float) -> str:
    size = abs(value)
    if size >= 99.5 or size == 0:
        return f"{value:,.0f}"
    places = 1 if size >= 9.95 else 2
    text = f"{value:.{places}f}" if size >= 0.0995 else f"{value:.2g}"
    return text.rstrip("0").rstrip(".") if "." in text else text

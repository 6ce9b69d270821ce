"""The report in a browser: a screenshot of every page is taken and must show something."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.loadtest.example_run import example_run, one_tenant_run
from tiercel.loadtest.report.run_page import write_report
from tiercel.loadtest.report.sweep_page import write_sweep
from tiercel.loadtest.results.sweep import Point, SearchPlan, make_sweep, search

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LIGHT, DARK = "light", "dark"
PICTURES = 14

_BOXES = """() => [...document.querySelectorAll('figure svg')].map(svg => {
  const box = svg.getBoundingClientRect();
  return [box.left, box.right, box.width, box.height];
})"""
_CUT_OFF = """() => [...document.querySelectorAll('figure svg')].flatMap(svg => {
  const around = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(text => {
    const box = text.getBoundingClientRect();
    return box.left < around.left - 4 || box.right > around.right + 4 || box.top < around.top - 4;
  }).map(text => text.textContent);
})"""
_OVERLAPS = """() => [...document.querySelectorAll('figure svg')].flatMap(svg => {
  const texts = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
  return texts.flatMap(([name, a], place) => texts.slice(place + 1).filter(([_, b]) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4).map(([other]) => name + ' / ' + other));
})"""
_SMALLEST = (
    "() => Math.min(...[...document.querySelectorAll('figure text')].map(t => t.getBoundingClientRect().height))"
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(example_run(), tmp_path_factory.mktemp("report"))


@pytest.fixture
def noise() -> list[str]:
    """Console messages, failed requests, and requests to a network."""
    return []


@pytest.fixture(params=[(1280, LIGHT), (1280, DARK), (390, LIGHT)], ids=["wide", "dark", "phone"])
def page(browser: "Browser", request: pytest.FixtureRequest, noise: list[str]) -> "Iterator[Page]":
    width, scheme = request.param
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.on("console", lambda message: noise.append(message.text))
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("request", lambda asked: noise.append(asked.url) if not asked.url.startswith(("file:", "data:")) else None)
    page.on("requestfailed", lambda asked: noise.append(f"failed: {asked.url}"))
    yield page
    page.close()


def test_every_chart_is_drawn_without_console_messages(
    page: "Page", report: Path, noise: list[str], tmp_path: Path
) -> None:
    page.goto(report.as_uri())
    boxes = page.evaluate(_BOXES)
    assert len(boxes) == PICTURES
    viewport = page.viewport_size
    assert viewport is not None
    for left, right, width, height in boxes:
        assert left >= 0
        assert right <= viewport["width"]
        assert width > 300
        assert height > 60
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page itself never scrolls sideways"
    assert noise == []
    assert _is_a_picture(page, tmp_path / "report.png")


def test_labels_of_charts_are_whole_apart_and_large_enough(page: "Page", report: Path) -> None:
    page.goto(report.as_uri())
    assert page.evaluate(_CUT_OFF) == []
    assert page.evaluate(_OVERLAPS) == []
    assert page.evaluate(_SMALLEST) > 9


def test_the_page_follows_the_readers_colour_scheme(page: "Page", report: Path) -> None:
    page.goto(report.as_uri())
    is_dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    drawn = page.evaluate("getComputedStyle(document.querySelector('figure text')).fill")
    assert (_brightness(background) < 60) == is_dark
    assert abs(_brightness(background) - _brightness(drawn)) > 70, "the words of a picture stand out"


def test_a_minimal_run_and_a_sweep_give_pages(page: "Page", noise: list[str], tmp_path: Path) -> None:
    page.goto(write_report(one_tenant_run(), tmp_path / "plain").as_uri())
    assert len(page.evaluate(_BOXES)) == 6
    assert page.evaluate(_OVERLAPS) == []
    plan = SearchPlan(precision=0.1)
    sweep = make_sweep(plan, ["tiercel", "bench", "sweep"], list(search(_measure, plan)))
    page.goto(write_sweep(sweep, one_tenant_run(), tmp_path / "sweep").as_uri())
    assert len(page.evaluate(_BOXES)) == 2
    assert page.evaluate(_CUT_OFF) == []
    assert page.evaluate(_OVERLAPS) == []
    assert noise == []
    assert _is_a_picture(page, tmp_path / "sweep.png")


def test_the_chart_files_beside_the_page_can_be_opened(browser: "Browser", report: Path) -> None:
    page = browser.new_page()
    for path in sorted(report.parent.glob("*.png")):
        page.goto(path.as_uri())
        assert page.evaluate("document.images[0].naturalWidth") > 900, path.name
    page.close()


def _measure(rate: float) -> Point:
    share = 1.0 if rate <= 5 else max(0.0, 2 - rate / 5)
    figures: dict[str, float | None] = {"median_ttft_ms": 80 + 20 * rate, "p99_ttft_ms": 300 * rate}
    return Point(
        rate=rate, good_share=share, request_throughput=min(rate, 5), output_throughput=40 * rate, figures=figures
    )


def _is_a_picture(page: "Page", path: Path) -> bool:
    """Return whether a screenshot shows charts: thousands of pixels of the accent colour and of other colours."""
    from PIL import Image

    page.screenshot(path=str(path), full_page=True)
    with Image.open(path) as opened:
        colours = opened.convert("RGB").getcolors(2**24)
        assert colours is not None
        paper = max(count for count, _ in colours)
        accent = sum(count for count, colour in colours if _is_accent(colour))
        return len(colours) > 100 and paper < opened.width * opened.height * 0.98 and accent > 1000


def _is_accent(colour: object) -> bool:
    assert isinstance(colour, tuple)
    red, green, blue = colour
    return bool(red > 150 and green < red - 60 and blue < green)


def _brightness(colour: str) -> float:
    """Return the brightness of a colour such as `rgb(1, 2, 3)`, 0 to 255."""
    numbers = [float(word) for word in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    return sum(numbers[:3]) / 3

"""The report: its page, its charts and its errors."""

import re
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from tests.loadtest.example_run import example_run, one_tenant_run
from tiercel.loadtest.report.drawing import VARIABLES
from tiercel.loadtest.report.run_charts import latency_charts, server_charts, tenant_charts, timeline_charts
from tiercel.loadtest.report.run_page import write_report
from tiercel.loadtest.report.wording import figure_words, show_factor, show_ms, show_number, show_percent
from tiercel.loadtest.results.record import RunResult, Sample
from tiercel.loadtest.results.result_file import decode_result, encode_result
from tiercel.values.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


class Page(HTMLParser):
    """The parsed page: tags with their attributes, text, and the tags that are open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "link"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [found for name, found in self.tags if name == tag]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(example_run(), tmp_path_factory.mktemp("report")).parent


@pytest.fixture(scope="module")
def single_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_report(one_tenant_run(), tmp_path_factory.mktemp("single")).read_text(encoding="utf-8")


def without_latencies() -> RunResult:
    """Return a run in which every request failed: its report has few charts."""
    return msgspec.structs.replace(
        one_tenant_run(),
        completed=0, failed=60, quantiles={}, figures={}, errors={"connection refused": 60}, tenants=[],
    )  # fmt: skip


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_the_page_is_well_formed_and_needs_nothing_else(folder: Path, page: Page) -> None:
    assert page.open == []
    assert not page.all("script")
    assert not page.all("img")
    text = (folder / "report.html").read_text(encoding="utf-8")
    outside = {url for url in re.findall(r"https?://[^\s\"'<]+", text) if not url.startswith("http://www.w3.org/")}
    assert outside == set()
    assert [link["href"] for link in page.all("link")] == ["data:,"]
    assert "default-src 'none'" in text


def test_every_chart_has_a_description_and_a_file_beside_the_page(folder: Path, page: Page) -> None:
    figures = [figure["id"] for figure in page.all("figure")]
    drawings = [svg for svg in page.all("svg") if svg.get("role") == "img"]
    assert len(figures) == len(drawings) == 14
    assert all(len(svg["aria-label"] or "") > 20 for svg in drawings)
    for name in figures:
        content = (folder / f"{name}.png").read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", content[16:24])
        assert width > 900
        assert height > 250


def test_ids_are_used_once(page: Page) -> None:
    ids = [found["id"] for _, found in page.tags if "id" in found]
    assert len(ids) == len(set(ids))


def test_drawings_take_every_colour_and_the_font_from_the_page(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert not re.findall(r"#[0-9a-f]{6}\b", drawings)
    assert "DejaVu" not in drawings
    assert all(f"var({variable})" in drawings for variable in VARIABLES.values())


def test_the_page_has_the_facts_of_the_run(page: Page) -> None:
    output = " ".join(page.words.split())
    for words in (
        "small-model", "300 requests in 60 s, 3 tenants", "within TTFT 500 ms, TPOT 60 ms", "Jain index",
        "While moving: HBM to DDR 2 GB/s.",
        "Lengths of prompts were estimated", "3 failed: 503 overloaded", "tiercel bench serve --tenants mix.yaml",
        "a fast one", "0.1.0", "nightly <reports>", "p99 TTFT", "vllm:num_preemptions_total",
    ):  # fmt: skip
        assert words.replace(" ", "") in re.sub(r"[\s\u202f]", "", output), words


def test_names_from_outside_are_escaped(folder: Path, tmp_path: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "<reports>" not in text
    assert "nightly &lt;reports&gt;" in text
    evil = msgspec.structs.replace(without_latencies(), label="<script>alert(1)</script>", metadata={"<b>": "<i>"})
    assert "<script" not in write_report(evil, tmp_path).read_text(encoding="utf-8")


def test_a_single_tenant_without_readings_gets_a_note_instead_of_charts(single_page: str) -> None:
    page = Page(single_page)
    names = {figure["id"] for figure in page.all("figure")}
    assert names == {"latency-ttft", "latency-tpot", "latency-itl", "latency-e2el", "throughput", "in-flight"}
    assert "/metrics were not read" in page.words
    assert "Tenants" not in page.words
    assert "Goodput" not in page.words


def test_a_run_of_failures_only_still_has_a_page(tmp_path: Path) -> None:
    page = Page(write_report(without_latencies(), tmp_path).read_text(encoding="utf-8"))
    assert "60 failed: connection refused" in page.words
    assert "100" in page.words


def test_metrics_that_are_missing_or_always_zero_are_named_and_not_drawn() -> None:
    samples = [
        Sample(
            sample.at_s,
            {key: value for key, value in sample.values.items() if "tier" not in key and "preemptions" not in key}
            | {"vllm:num_preemptions_total": 7.0},
        )
        for sample in example_run().samples
    ]
    charts, missing = server_charts(msgspec.structs.replace(example_run(), samples=samples))
    assert {chart.name for chart in charts} == {"server-queue", "tiers", "prefix-hits"}
    assert missing == [
        "The server does not export: transfers, service by the server's clock.",
        "Zero all the time: preemptions.",
    ]


@pytest.mark.slow
def test_due_times_are_drawn_if_they_differ_from_send_times() -> None:
    run = example_run()
    first, per_token, *_ = latency_charts(run)
    assert "due" in first.caption
    assert "due: p99" in first.svg
    assert "due" not in per_token.caption
    same = msgspec.structs.replace(run, quantiles=run.quantiles | {"ttft_due": run.quantiles["ttft"]})
    first, *_ = latency_charts(same)
    assert "the same within 2 %" in first.caption
    assert "due: p99" not in first.svg


@pytest.mark.slow
def test_a_long_run_is_drawn_with_few_steps() -> None:
    run = example_run()
    line = run.timeline
    longer = msgspec.structs.replace(
        line,
        **{
            name: list(getattr(line, name)) * 60
            for name in ("output_tokens", "finished", "failed", "running", "queued")
        },
    )
    long, _ = timeline_charts(msgspec.structs.replace(run, timeline=longer))
    short, _ = timeline_charts(run)
    assert len(long.svg) < 6 * len(short.svg)


@pytest.mark.slow
def test_many_tenants_are_drawn_as_the_largest_few() -> None:
    run = example_run()
    many = [
        msgspec.structs.replace(run.tenants[0], name=f"tenant {number}", service_tokens=float(number))
        for number in range(30)
    ]
    shares, _ = tenant_charts(msgspec.structs.replace(run, tenants=many))
    assert "The 22 tenants with less service are in the table only." in shares.caption
    assert "tenant 29" in shares.svg
    assert "tenant 3<" not in shares.svg


_DRAW = """
import sys, matplotlib
from tiercel.loadtest.report.run_charts import latency_charts
from tests.loadtest.example_run import one_tenant_run

def settings():  # but the backend: reading it loads pyplot
    return {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}

before = settings()
next(latency_charts(one_tenant_run()))
print(settings() == before, "matplotlib.pyplot" in sys.modules)
"""


def test_drawing_leaves_no_trace_in_matplotlib() -> None:
    ran = subprocess.run([sys.executable, "-c", _DRAW], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "True False\n"


@pytest.mark.slow
def test_the_same_result_gives_the_same_page(single_page: str, tmp_path: Path) -> None:
    assert single_page == write_report(one_tenant_run(), tmp_path).read_text(encoding="utf-8")


def test_a_detailed_result_survives_the_file() -> None:
    run = example_run()
    read = decode_result(encode_result(run))
    assert read.requests == run.requests
    assert read.errors == {"503 overloaded": 3}
    assert read.quantiles == run.quantiles


def test_without_matplotlib_one_line_names_the_package_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from tiercel.cli.main import main; sys.exit(main(['bench', 'report', sys.argv[1]]))"
    )
    result = tmp_path / "result.json"
    result.write_bytes(encode_result(one_tenant_run()))
    ran = subprocess.run([sys.executable, "-c", code, str(result)], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr == "tiercel: error: charts need matplotlib: pip install 'tiercel[bench]'\n"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="file"):
        write_report(without_latencies(), tmp_path / "file")


def test_numbers_are_written_for_people() -> None:
    assert [show_number(value) for value in (0, 0.0421, 0.5, 7.25, 42.04, 812.4, 12_400.0)] == [
        *("0", "0.042", "0.5", "7.25", "42", "812", "12,400"),
    ]
    assert [show_ms(value).replace("\u202f", " ") for value in (0.8, 142.3, 3210, 270_000)] == [
        *("0.8 ms", "142 ms", "3.21 s", "4.5 min"),
    ]
    assert show_percent(0.373).replace("\u202f", " ") == "37.3 %"
    assert show_factor(1.3).replace("\u202f", " ") == "\N{MULTIPLICATION SIGN} 1.30"
    assert figure_words("p99_e2el_due_ms") == "p99 E2EL from due"


def test_the_command_writes_beside_the_last_result_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tiercel.cli.main import main

    runs: list[RunResult] = [one_tenant_run(), msgspec.structs.replace(one_tenant_run(), label="the last")]
    path = tmp_path / "result.json"
    path.write_bytes(b"\n".join(map(encode_result, runs)))
    assert main(["bench", "report", str(path)]) == 0
    captured = capsys.readouterr()
    written = Path(captured.out.strip())
    assert written == tmp_path / "result.report" / "report.html"
    assert "the last" in written.read_text(encoding="utf-8")
    assert "has 2 results" in captured.err

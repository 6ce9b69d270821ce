import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from tiercel.cli.live_table import render
from tiercel.cli.main import main
from tiercel.cli.monitor import MetricsError, Monitor
from tiercel.outcome import Gauges
from tiercel.server.metrics.registry import ServerMetrics
from tiercel.wire import Ready

Captured = pytest.CaptureFixture[str]

READY = Ready(
    max_model_len=512, vocab_size=100, block_size=16, blocks_total=100, dtype="float32", device="cpu",
    model_impl="native", weights_bytes=1, kv_bytes=1, load_s=0.1,
)  # fmt: skip


def page(
    *, tokens: int = 0, gaps: dict[str, int] | None = None, running: int = 0, more: str = "", label: str = ""
) -> str:
    """A /metrics page; `gaps`: cumulative counts by bound."""
    buckets = "\n".join(
        f'vllm:inter_token_latency_seconds_bucket{{engine="0",le="{bound}",model_name="m"}} {count}'
        for bound, count in (gaps or {}).items()
    )
    return f"""# HELP vllm:num_requests_running x
vllm:num_requests_running{{engine="0",model_name="m"{label}}} {running}
vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}
{buckets}
{more}
"""


def shown(monitor: Monitor, trouble: str = "", width: int = 100) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(render(monitor.figures(), "http://here", trouble))
    return captured.get().replace("\u202f", " ")


def test_rates_are_growth_over_the_window() -> None:
    monitor = Monitor()
    monitor.take(0.0, page(tokens=100))
    monitor.take(4.0, page(tokens=300, running=7))
    figures = monitor.figures()
    assert figures.tokens_out_per_s == 50
    assert figures.running == 7
    assert figures.model == "m"
    assert figures.tokens_in_per_s is None


def test_readings_older_than_the_window_count_no_more() -> None:
    monitor = Monitor(window_s=10)
    for second in range(0, 40, 2):
        monitor.take(float(second), page(tokens=10 * second if second < 20 else 200 + 1000 * (second - 20)))
    figures = monitor.figures()
    assert figures.window_s == 10
    assert figures.tokens_out_per_s == 1000


def test_percentiles_are_of_what_the_histogram_saw_in_the_window() -> None:
    monitor = Monitor()
    monitor.take(0.0, page(gaps={"0.01": 5000, "0.1": 5000, "1.0": 5000, "+Inf": 5000}))
    monitor.take(1.0, page(gaps={"0.01": 5000, "0.1": 5080, "1.0": 5098, "+Inf": 5100}))
    median, p90, p99 = monitor.figures().latencies_s["between tokens"]
    assert median == pytest.approx(0.01 + 0.09 * 50 / 80)
    assert p90 == pytest.approx(0.1 + 0.9 * 10 / 18)
    assert p99 == float("inf")
    assert "beyond" in shown(monitor)


def test_a_histogram_that_saw_nothing_is_a_dash() -> None:
    monitor = Monitor()
    monitor.take(0.0, page(gaps={"0.1": 3, "+Inf": 3}))
    monitor.take(1.0, page(gaps={"0.1": 3, "+Inf": 3}))
    assert monitor.figures().latencies_s["between tokens"] == (None, None, None)


def test_a_server_that_started_anew_begins_a_new_window() -> None:
    monitor = Monitor()
    monitor.take(0.0, page(tokens=9000))
    monitor.take(1.0, page(tokens=10))
    assert monitor.figures().tokens_out_per_s is None
    monitor.take(2.0, page(tokens=30))
    assert monitor.figures().tokens_out_per_s == 20


def test_tenants_and_tiers_are_shown_where_the_server_tells() -> None:
    def more(seconds: int) -> str:
        return f"""tiercel_tenant_running{{tenant="anna"}} 3
tiercel_tenant_running{{tenant="[bold]b"}} 1
tiercel_tenant_running{{tenant="idle"}} 0
tiercel_tenant_generation_tokens_total{{tenant="anna"}} {40 * seconds}
tiercel_tenant_service_seconds_total{{tenant="anna"}} {seconds}
tiercel_tenant_service_seconds_total{{tenant="[bold]b"}} 7
tiercel_tenant_weight{{tenant="anna"}} 1
tiercel_tenant_weight{{tenant="[bold]b"}} 3
tiercel_tenant_weight{{tenant="idle"}} 50
tiercel_kv_used_bytes{{tier="ddr"}} 25
tiercel_kv_capacity_bytes{{tier="ddr"}} 100
tiercel_kv_transfer_bytes_total{{route="ddr_hbm"}} {3_000_000 * seconds}
tiercel_preemptions_total{{mode="swap",reason="capacity"}} 5
tiercel_preemptions_total{{mode="swap",reason="priority"}} 2
tiercel_preemptions_total{{mode="recompute",reason="capacity"}} 4"""

    monitor = Monitor()
    monitor.take(0.0, page(more=more(0)))
    assert "waiting" in shown(monitor)
    monitor.take(2.0, page(more=more(2)))
    text = shown(monitor)
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith(("anna", "[bold]b"))}
    assert rows["anna"] == ["anna", "3", "40/s", "100", "%", "25", "%"]
    assert rows["[bold]b"] == ["[bold]b", "1", "\u2013", "0", "%", "75", "%"], "it starves; names are no markup"
    assert "DDR" in text
    assert "25 %" in text
    assert "DDR to HBM" in text
    assert "3 MB/s" in text
    assert monitor.figures().preemptions_by_mode == {"recompute": 4, "swap": 7}
    assert "TTFT p50" not in text, "a column that no tenant has is left out"


def test_our_own_server_fills_the_table() -> None:
    metrics = ServerMetrics("small")
    metrics.on_ready(READY)
    monitor = Monitor()
    monitor.take(0.0, metrics.exposition().decode())
    after = Gauges(
        num_running=4,
        num_waiting=2,
        blocks_total=100,
        blocks_used=60,
        preemptions=3,
        prefix_queries=100,
        prefix_hits=30,
    )
    metrics.on_step(after)
    monitor.take(1.0, metrics.exposition().decode())
    figures = monitor.figures()
    assert (figures.running, figures.waiting, figures.kv_usage) == (4, 2, 0.6)
    assert figures.preemptions_per_s == 3
    assert figures.hit_rate == 0.3
    assert set(figures.latencies_s) == {"time to first token", "between tokens", "end to end", "in the queue"}
    assert "(3 in all)" in shown(monitor)


def test_the_table_fits_eighty_columns() -> None:
    metrics = ServerMetrics("a-model-with-quite-a-long-name")
    metrics.on_ready(READY)
    monitor = Monitor()
    for second in range(2):
        monitor.take(float(second), metrics.exposition().decode())
    assert "\u2026" not in shown(monitor, width=80)


def test_trouble_is_shown_above_the_last_figures() -> None:
    monitor = Monitor()
    monitor.take(0.0, page(running=5))
    text = shown(monitor, trouble="http://here: gone")
    assert "gone" in text
    assert "5" in text


def test_a_page_that_is_none_is_refused() -> None:
    with pytest.raises(MetricsError, match="no metrics"):
        Monitor().take(0.0, "<html>hello</html>")


class Metrics(ThreadingHTTPServer):
    """Answers GET /metrics as the test says."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.key: str | None = None
        self.asked = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Metrics

    def do_GET(self) -> None:
        self.server.asked += 1
        self.server.key = self.headers["authorization"]
        self.send_response(self.server.status if self.path.partition("?")[0] == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(page(tokens=100 * self.server.asked, running=3).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    with Metrics() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_once_prints_one_table_from_two_readings(metrics: Metrics, capsys: Captured) -> None:
    assert main(["top", "--once", "--interval", "0.1", "--url", f"{metrics.url}/v1/", "--api-key", "secret"]) == 0
    out = capsys.readouterr().out
    assert metrics.asked == 2
    assert metrics.key == "Bearer secret"
    (line,) = [line for line in out.splitlines() if "running" in line]
    assert line.split()[:2] == ["running", "3"]
    assert "secret" not in out


@pytest.mark.parametrize(("status", "words"), [(401, "--api-key"), (404, "has no /metrics"), (503, "answers 503")])
def test_what_is_wrong_with_the_server_is_one_line(metrics: Metrics, status: int, words: str, capsys: Captured) -> None:
    metrics.status = status
    assert main(["top", "--once", "--url", metrics.url]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tiercel: error: ")
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_a_server_that_is_not_there_is_one_line(capsys: Captured) -> None:
    assert main(["top", "--url", "http://127.0.0.1:9"]) == 1
    assert "is `tiercel serve` running there?" in capsys.readouterr().err
    assert main(["top", "--url", "no url"]) == 1
    assert capsys.readouterr().err.count("\n") == 1

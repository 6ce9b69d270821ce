"""The deployment: the image, compose, the network, signals, volumes."""

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.engine import TINY, Engine
from tests.deploy.machine import CommandError
from tests.deploy.stack import KEY, Stack, bearer
from tests.deploy.supplies import BASE, KERNELS
from tests.e2e.prompts import MIN_TOKENS, PROMPTS

IMAGE = "tiercel:cpu"
MAX_IMAGE_BYTES = 1_500_000_000
FILL = """
import os
file = os.open('/var/lib/tiercel/filler', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
try:
    while True:
        os.write(file, bytes(4096))
except OSError as exc:
    print(exc)
"""
CHILD = "child = lambda pid: open(f'/proc/{pid}/task/{pid}/children').read().split()[0]"
DAEMON_PID = f"{CHILD}; print(child(1))"  # 1 is the init of the container
ENGINE_PID = f"{CHILD}; print(child(child(1)))"
HITS = "tiercel_kv_hit_tokens_total"
TRANSFERRED = "tiercel_kv_transfer_bytes_total"
UP = 'up{job="tiercel"}'
KILL = "import os, sys; os.kill(int(sys.argv[1]), 9)"


@pytest.fixture(scope="module")
def first_token(stack: Stack, figures: list[str]) -> str:
    """Run `compose up` with a built image and measure the time to the first token."""
    began_s = time.monotonic()
    stack.compose("up", "--detach", "--no-build")
    up_s = time.monotonic() - began_s
    stack.wait_ready()
    ready_s = time.monotonic() - began_s
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    for event in stack.stream("/v1/chat/completions", **body):
        text = event["choices"][0]["delta"].get("content")
        if text:
            figures.append(
                f"docker compose up to the first token: {time.monotonic() - began_s:.1f} s"
                f" (compose returned after {up_s:.1f} s, ready after {ready_s:.1f} s)"
            )
            return text
    raise AssertionError("no token")


@pytest.fixture
def running(stack: Stack, first_token: str) -> Stack:
    """Return the daemon when it is ready."""
    stack.wait_ready()
    return stack


def test_the_image_is_small(engine: Engine, tree: Path, figures: list[str]) -> None:
    size = int(engine.docker("image", "inspect", "--format", "{{.Size}}", IMAGE))
    figures.append(f"image: {size / 1e9:.2f} GB")
    assert size <= MAX_IMAGE_BYTES


def test_the_first_token_comes(first_token: str) -> None:
    assert first_token


def test_the_container_turns_healthy(running: Stack) -> None:
    running.compose("up", "--detach", "--no-build", "--wait")
    assert running.inspect("{{.State.Health.Status}}") == "healthy"


def test_a_chat_completion_comes_through_the_published_port(running: Stack) -> None:
    answer = running.chat("The code of Anna is 4821. What is the code of Anna?")
    assert answer.status_code == 200, answer.text
    assert "4821" in answer.json()["choices"][0]["message"]["content"]


def test_requests_without_the_key_are_refused(running: Stack) -> None:
    assert httpx.get(f"{running.url}/v1/models", trust_env=False).status_code == 401
    assert running.http.get("/v1/models").status_code == 200


def test_the_daemon_has_no_rights_and_only_its_volume_can_be_written(running: Stack) -> None:
    assert running.python("import os; print(os.getuid(), os.getgid())") == "10001 10001"
    assert re.search(r"^CapEff:\s+0+$", running.python("print(open('/proc/1/status').read())"), re.MULTILINE)
    for folder in ("/", "/etc/tiercel", "/opt/tiercel", "/models"):
        with pytest.raises(CommandError, match="Read-only file system"):
            running.python("import sys; open(sys.argv[1] + '/x', 'w')", folder.rstrip("/"))


@pytest.mark.skipif(not KERNELS.is_file(), reason="no compiler here: `make setup` compiled no kernels")
def test_the_image_has_the_kernels_that_were_compiled_here(running: Stack) -> None:
    loaded = "from tiercel.engine.native.library import load_library; print(load_library() is not None)"
    assert running.python(loaded).splitlines()[-1] == "True"


def test_a_load_test_leaves_its_report_on_a_volume(running: Stack) -> None:
    load = ("--num-prompts=24", "--request-rate=inf", "--random-input-len=64", "--random-output-len=16")
    running.compose("--profile", "loadtest", "run", "--rm", "-T", "loadtest", *load)
    reports = "/var/lib/tiercel/reports"
    look = ("run", "--rm", "--volume", f"{running.name}_reports:{reports}:ro", "--entrypoint", "cat", IMAGE)
    result = json.loads(running.engine.docker(*look, f"{reports}/result.json"))
    assert (result["completed"], result["failed"]) == (24, 0)
    assert result["total_output_tokens"] > 0
    page = running.engine.docker(*look, f"{reports}/report.html")
    assert page.lstrip().startswith("<!")
    assert "</html>" in page


def test_after_a_sigkill_of_the_engine_process_it_serves_again(running: Stack) -> None:
    before = running.python(ENGINE_PID), running.inspect("{{.State.StartedAt}}")
    with contextlib.suppress(CommandError):  # the container may be gone before the command in it ends
        running.python(KILL, before[0])

    def is_another() -> bool:
        with contextlib.suppress(CommandError, httpx.TransportError):
            now = running.python(ENGINE_PID), running.inspect("{{.State.StartedAt}}")
            return now != before and running.http.get("/ready").status_code == 200
        return False

    running.wait(is_another, "another engine process")
    assert running.chat("Hello").status_code == 200


def test_after_a_sigkill_of_the_daemon_its_container_restarts(running: Stack) -> None:
    restarts = int(running.inspect("{{.RestartCount}}"))
    with contextlib.suppress(CommandError):  # as above
        running.python(KILL, running.python(DAEMON_PID))
    running.wait(lambda: int(running.inspect("{{.RestartCount}}")) > restarts, "restarted")
    running.wait_ready()
    assert running.chat("Hello").status_code == 200


@pytest.fixture(scope="module")
def served(stack: Stack, first_token: str) -> str:
    """Return the answer to a long prompt, served once before the next two tests stop and replace the container."""
    stack.wait_ready()
    printed, cached = stack.complete(PROMPTS[0])
    assert cached == 0
    return printed


def test_a_stop_lets_a_stream_finish(running: Stack, served: str) -> None:
    """The stream is long enough to run when the signal comes, and short enough to end within the drain."""
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True}
    events = running.stream("/v1/completions", **body, stream_options={"include_usage": True})
    rest = [next(events)]
    stop = ("stop", "--time", "40", f"{running.name}-tiercel-1")
    stopping = threading.Thread(target=running.engine.docker, args=stop)
    stopping.start()
    is_refused = False
    for event in events:
        rest.append(event)
        is_refused = is_refused or _refuses(running)
    stopping.join()
    assert is_refused, "the stream had ended before the signal came"
    *_, end, usage = rest
    assert end["choices"][0]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == 400
    assert running.inspect("{{.State.ExitCode}}") == "0"


def _refuses(running: Stack) -> bool:
    """Return whether new requests are refused: not ready, or no longer listening."""
    try:
        return running.http.get("/ready").status_code == 503
    except httpx.TransportError:
        return True


def test_a_new_container_finds_the_ssd_tier(stack: Stack, served: str) -> None:
    stack.compose("down")
    stack.compose("up", "--detach", "--no-build")
    stack.wait_ready()
    printed, cached = stack.complete(PROMPTS[0])
    assert printed == served
    assert cached >= MIN_TOKENS
    assert stack.metric(HITS, tier="ssd") >= MIN_TOKENS


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with settings that name a tenants file."""
    folder = tmp_path_factory.mktemp("settings")
    folder.chmod(0o755)
    (folder / "tiercel.toml").write_text('tenants-config = "/etc/tiercel/tenants.yaml"\ncalibration-seconds = 0\n')
    (folder / "tenants.yaml").write_text(f"tenants: [{{name: first, key: {KEY}}}]\n")
    return folder


@pytest.fixture(scope="module")
def small_volume(engine: Engine, tree: Path, settings: Path, network: None) -> Iterator[Stack]:
    """Yield a daemon with tenants, whose volume has little space beside the SSD tier."""
    files = (tree / "docker" / "compose.yaml", tree / "tests" / "deploy" / "compose.small-volume.yaml")
    stack = Stack(engine, "tiercel-small-volume", files, 8100, TIERCEL_API_KEY="", TIERCEL_CONFIG_DIR=str(settings))
    holder = f"{stack.name}-holder"
    stack.compose("down", "--volumes")
    try:
        stack.compose("up", "--detach", "--no-build")
        # Keeps the volume mounted while the daemon restarts: it lives in memory.
        volume = f"{stack.name}_state:/held"
        engine.docker("run", "--detach", "--rm", "--name", holder, "--volume", volume, TINY, "/busybox", "sleep", "600")
        stack.wait_ready()
        yield stack
    finally:
        with contextlib.suppress(CommandError):
            engine.docker("rm", "--force", holder)
        stack.compose("down", "--volumes", "--timeout", "5")
        stack.http.close()


def test_a_tenants_file_is_read_at_the_start_and_at_sighup(small_volume: Stack, settings: Path) -> None:
    second = bearer("sk-second")
    assert small_volume.http.get("/v1/models").status_code == 200
    assert small_volume.http.get("/v1/models", headers=second).status_code == 401
    draft = settings / "draft.yaml"
    draft.write_text(f"tenants: [{{name: first, key: {KEY}}}, {{name: second, key: sk-second}}]\n")
    draft.rename(settings / "tenants.yaml")
    small_volume.compose("kill", "--signal", "HUP", "tiercel")
    small_volume.wait(lambda: small_volume.http.get("/v1/models", headers=second).status_code == 200, "known")
    assert small_volume.http.get("/metrics", headers=second).status_code == 401


def test_a_full_volume_fails_no_request(small_volume: Stack) -> None:
    """The SSD tier continues, because its space was allocated at the start; other data is not written."""
    before = [small_volume.complete(prompt)[0] for prompt in PROMPTS[:2]]
    assert "No space left on device" in small_volume.python(FILL)
    written = small_volume.metric(TRANSFERRED, route="ddr_ssd")
    answers = [small_volume.complete(prompt)[0] for prompt in PROMPTS]
    assert answers[:2] == before
    small_volume.wait(lambda: small_volume.metric(TRANSFERRED, route="ddr_ssd") > written, "written")
    assert small_volume.metric("tiercel_kv_disk_state", state="on") == 1
    small_volume.compose("restart")  # and it starts again on the full volume
    small_volume.wait_ready()
    warm = [small_volume.complete(prompt) for prompt in PROMPTS]
    assert [text for text, _ in warm] == answers
    assert sum(cached for _, cached in warm) >= MIN_TOKENS
    assert "No space left on device" in small_volume.python(FILL)
    assert small_volume.inspect("{{.RestartCount}} {{.State.Status}}") == "0 running"


def test_a_volume_without_room_for_the_tier_is_refused_by_its_name(engine: Engine, tree: Path, network: None) -> None:
    key, disk = "--env=TIERCEL_API_KEY=none", "--env=TIERCEL_KV_DISK_PATH=/var/lib/tiercel/kv"
    volume = "--tmpfs=/var/lib/tiercel:size=8m,uid=10001,gid=10001,mode=0700"
    with pytest.raises(CommandError, match=r"ended with 2: .*no room for .* in /var/lib/tiercel/kv"):
        engine.docker("run", "--rm", "--read-only", "--tmpfs=/tmp", key, disk, volume, IMAGE)


def test_the_image_for_a_device_builds_and_refuses_a_machine_without_one(engine: Engine, tree: Path) -> None:
    """The image is built with torch for the CPU: this checks the steps of the build, not the work on a device."""
    files = [f"--file={tree / 'docker' / name}" for name in ("compose.yaml", "compose.gpu.yaml")]
    torch = os.environ.get("TORCH") or "torch"
    variables = {"BASE": BASE, "COMPILER": BASE, "TORCH": torch, "PIP_ARGS": "--no-index", "TIERCEL_API_KEY": KEY}
    engine.docker("compose", *files, "build", "--quiet", "tiercel", variables=variables)
    with pytest.raises(CommandError, match=r"ended with 2: .*tiercel: .*cuda"):
        engine.docker("run", "--rm", "--env=TIERCEL_API_KEY=none", "tiercel:cuda")


def test_a_front_and_two_engines_serve_and_a_killed_engine_ends_no_stream(
    engine: Engine, tree: Path, network: None, stack: Stack
) -> None:
    files = (tree / "docker" / "compose.yaml", tree / "docker" / "compose.fleet.yaml")
    stack.compose("stop")  # there is memory for one daemon
    fleet = Stack(engine, "fleet", files, 8017, TIERCEL_MEMORY="2g", TIERCEL_KV_DISK_SIZE="64M")

    def states() -> list[str]:
        return list(fleet.http.get("/health").json()["engines"].values())

    try:
        fleet.compose("up", "--detach", "--no-build")
        fleet.wait_ready()
        fleet.wait(lambda: states() == ["ready", "ready"], "ready")
        fields = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
        expected = "".join(chunk["choices"][0]["text"] for chunk in fleet.stream("/v1/completions", **fields))
        pieces: list[str] = []
        for chunk in fleet.stream("/v1/completions", **fields):
            pieces.append(chunk["choices"][0]["text"])
            if len(pieces) == 20:
                (busy,) = [name for name in ("engine-1", "engine-2") if _unfinished(fleet, name)]
                fleet.compose("kill", busy)
        assert "".join(pieces) == expected
        fleet.compose("start", busy)
        fleet.wait(lambda: states() == ["ready", "ready"], "ready again")
    finally:
        fleet.compose("down", "--volumes")
        fleet.http.close()
        stack.compose("start")


def _unfinished(fleet: Stack, engine: str) -> float:
    return fleet.metric("tiercel_fleet_engine_unfinished", engine=f"{engine}:8100")


def test_prometheus_scrapes_the_daemon_with_its_key(running: Stack, prometheus: str | None, tree: Path) -> None:
    """Debian's Prometheus replaces the official image, which needs a registry. Debian has no Grafana."""
    if prometheus is None:
        pytest.skip("apt has no package prometheus")
    watched = running.with_files(
        tree / "docker" / "compose.observability.yaml",
        PROMETHEUS_IMAGE=prometheus, GRAFANA_PASSWORD="none", TIERCEL_METRICS_KEY=KEY,
    )  # fmt: skip
    watched.compose("up", "--detach", "--no-build", "--no-recreate", "prometheus")

    def ask(path: str) -> Any:  # Any: JSON
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"http://127.0.0.1:9090/api/v1/{path}", trust_env=False)
            return answer.json()["data"] if answer.status_code == 200 else {}  # 503 while it starts
        return {}

    watched.wait(lambda: [one["value"][1] for one in ask(f"query?query={UP}").get("result", [])] == ["1"], "scraped")
    groups = ask("rules")["groups"]
    assert [rule["name"] for group in groups for rule in group["rules"] if rule["health"] == "err"] == []
    assert groups

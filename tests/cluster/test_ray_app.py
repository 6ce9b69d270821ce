"""A fleet on a real Ray of this machine: growth, a killed actor and shrinking, with open streams."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.daemon import command_of
from tests.e2e.fleet import StreamedText, draw_bodies, make_secret, stream_all, tokens_of, undisturbed

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # of other people's code

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = str(ROOT / "tiercel" / "embedded" / "model")
EXACT = ["--dtype", "float32", "--threads", "1", "--calibration-seconds", "0"]
STREAMS, TOKENS = 8, 3000


@dataclass
class Deployed:
    """The application, and where its front listens."""

    url: str
    secret: Path
    port: int

    def deploy(self) -> None:
        """Deploy one front and one or two engines."""
        from ray import serve

        from tiercel.cluster.fleet_args import FleetArgs
        from tiercel.cluster.ray_app import app

        args = FleetArgs(
            model=MODEL,
            secret_file=str(self.secret),
            front_port=self.port,
            front_cpus=0,
            engine_cpus=0.5,
            engine_flags=EXACT,
            most_engines=2,
            goal_s=0.1,  # the engines are not calibrated, and are expected to be far faster than they are
            calm_s=5.0,
            drain_s=2.0,
        )
        serve.run(app(args), name="tiercel", route_prefix=None)

    def engines(self) -> dict[str, str]:
        """The states of the engines, as the front sees them."""
        return httpx.get(f"{self.url}/health", timeout=10).json().get("engines", {})

    def wait_engines(self, count: int, patience_s: float = 90.0) -> None:
        """Wait until this many engines are ready, and no more are known."""
        wait(lambda: sorted(self.engines().values()) == ["ready"] * count, patience_s, lambda: str(self.engines()))


def wait(is_so: Callable[[], bool], patience_s: float, say: Callable[[], str]) -> None:
    """Wait for a condition; an answer that does not come is a no."""
    end_s = time.monotonic() + patience_s
    while True:
        try:
            if is_so():
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < end_s, say()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    ray = pytest.importorskip("ray")
    from ray import serve

    folder = tmp_path_factory.mktemp("ray")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        serve.start(proxy_location="Disabled")
        found = Deployed(f"http://127.0.0.1:{port}", make_secret(folder), port)
        found.deploy()
        found.wait_engines(1)
        yield found
    finally:
        serve.shutdown()
        ray.shutdown()


def test_open_streams_outlive_growth_a_killed_actor_and_shrinking(deployed: Deployed) -> None:
    """Predicted work adds an engine, and its end removes one."""

    async def grown(answers: list[StreamedText]) -> None:
        await asyncio.to_thread(deployed.wait_engines, 2)
        assert any(answer.finish_reason is None for answer in answers)

    async def kill(answers: list[StreamedText]) -> None:
        await tokens_of(answers, STREAMS * 10)
        await asyncio.to_thread(os.kill, engine_actor(), signal.SIGKILL)

    bodies = draw_bodies(STREAMS, TOKENS)
    expected = asyncio.run(stream_all(deployed.url, bodies, grown, "grown"))
    check(expected, asyncio.run(stream_all(deployed.url, bodies, kill, "killed")))
    deployed.wait_engines(2)

    short = draw_bodies(2, 100)  # next to no work; some are open when an engine is stopped
    expected, end_s = [], time.monotonic() + 120
    while len(deployed.engines()) > 1:
        answers = asyncio.run(stream_all(deployed.url, short, undisturbed, "short"))
        check(expected or answers, answers)
        expected = answers
        assert time.monotonic() < end_s, deployed.engines()
    deployed.wait_engines(1)


def test_a_client_of_openai_chats(deployed: Deployed) -> None:
    client = openai.OpenAI(base_url=f"{deployed.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Hello!"}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=12)  # pyright: ignore
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 12


def engine_actor() -> int:
    """The process id of an actor with an engine."""
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if "EngineHost" in command_of(pid):
            return pid
    raise AssertionError("no actor has an engine")


def check(expected: list[StreamedText], answers: list[StreamedText]) -> None:
    assert not [answer.error for answer in answers if answer.error]
    assert [answer.said for answer in answers] == [answer.said for answer in expected]

"""A new daemon takes over port and SSD tier of a running one: no connection fails, and no stream is cut."""

import contextlib
import os
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.daemon import TIERCEL, Daemon, daemon
from tests.e2e.prompts import MIN_TOKENS, ONE_THREAD, PROMPTS, cached_tokens
from tests.e2e.test_restart import disk_flags

LONG: dict[str, object] = {
    "prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True, "temperature": 0,
}  # fmt: skip


class Clients:
    """Clients that send requests until they are stopped: one with a new connection each time, one that keeps its own.

    `errors` has everything that was not a right answer.
    """

    def __init__(self, make: Callable[[], httpx.Client]) -> None:
        self.errors: list[str] = []
        self.answers = {"new": 0, "kept": 0}
        self._make = make
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(kind,)) for kind in self.answers]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Send nothing more. To be called before the daemon ends."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, kind: str) -> None:
        client = self._make()
        while not self._stop.is_set():
            if kind == "new":
                client.close()
                client = self._make()
            try:
                answer = client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2})
                if answer.status_code != 200:
                    self.errors.append(f"{kind}: {answer.status_code} {answer.text}")
            except httpx.HTTPError as exc:
                self.errors.append(f"{kind}: {exc!r}")
            self.answers[kind] += 1
            time.sleep(0.01)
        client.close()


class Stream(threading.Thread):
    """A long stream, read in the background."""

    def __init__(self, client: httpx.Client) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._client = client
        self.start()
        while len(self.lines) < 4:
            assert self.is_alive()
            time.sleep(0.01)

    def run(self) -> None:
        with self._client.stream("POST", "/v1/completions", json=LONG) as stream:
            self.lines.extend(stream.iter_lines())

    def assert_whole(self) -> None:
        """Wait for the end, which must be the limit on tokens."""
        self.join(110)
        assert self.lines[-2:] == ["data: [DONE]", ""], self.lines[-4:]
        assert '"finish_reason":"length"' in "".join(self.lines)


def control(folder: Path) -> tuple[str, ...]:
    return ("--control-socket", str(folder / "control"), "--shutdown-timeout", "120", *ONE_THREAD)


def tcp_client(running: Daemon) -> Callable[[], httpx.Client]:
    return lambda: httpx.Client(base_url=running.url, timeout=60)


def port_of(running: Daemon) -> str:
    return running.url.rsplit(":", 1)[1]


@pytest.mark.slow
def test_no_connection_fails_and_the_new_daemon_finds_the_blocks_of_the_old_one(
    tmp_path: Path, answers: dict[str, str]
) -> None:
    flags = (*disk_flags(tmp_path), *control(tmp_path))
    with daemon(tmp_path, *flags) as old:
        assert cached_tokens(old, PROMPTS[0]) == (answers[PROMPTS[0]], 0)
        while not old.metric('tiercel_kv_transfer_bytes_total{route="ddr_ssd"}'):
            time.sleep(0.05)
        time.sleep(1.0)
        make = tcp_client(old)
        with Clients(make) as clients, make() as reader:
            stream = Stream(reader)
            with daemon(tmp_path, *flags, "--port", port_of(old), "--takeover") as new:
                assert new.url == old.url
                served = dict(clients.answers)
                stream.assert_whole()
                assert old.process.wait(120) == 0
                assert cached_tokens(new, PROMPTS[0])[0] == answers[PROMPTS[0]]
                while any(clients.answers[kind] < served[kind] + 5 for kind in served):
                    time.sleep(0.05)
                assert "takeover_done" in new.log.read_text()
                assert cached_tokens(new, PROMPTS[0])[1] >= MIN_TOKENS
                assert new.metric('tiercel_kv_transfer_bytes_total{route="ssd_ddr"}') > 0
                with daemon(tmp_path, *flags, "--port", port_of(old), "--takeover"):
                    assert new.process.wait(120) == 0
                    clients.stop()
        assert not clients.errors


@pytest.mark.slow
def test_a_new_daemon_that_cannot_load_leaves_the_old_one_serving(tmp_path: Path) -> None:
    flags = (*disk_flags(tmp_path), *control(tmp_path))
    with daemon(tmp_path, *flags) as old, Clients(tcp_client(old)) as clients:
        command = [TIERCEL, "serve", *flags, "--port", port_of(old), "--takeover", "--kv-cache-memory-bytes", "900T"]
        failed = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert failed.returncode == 2
        assert "--kv-cache-memory-bytes" in failed.stderr
        assert old.complete("Once").status_code == 200
        while "takeover_failed" not in old.log.read_text():
            time.sleep(0.02)
        with daemon(tmp_path, *flags, "--port", port_of(old), "--takeover") as new:
            assert old.process.wait(120) == 0
            assert new.complete("Once").status_code == 200
            clients.stop()
    assert not clients.errors


@contextlib.contextmanager
def certificate(folder: Path) -> Iterator[tuple[str, str]]:
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command, *names], check=True, capture_output=True)
    yield str(key), str(cert)


@pytest.mark.slow
def test_a_takeover_of_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    flags = ("--uds", str(path), *control(tmp_path))

    def make() -> httpx.Client:
        return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=60)

    with daemon(tmp_path, *flags, wait=False) as old:
        old.wait_said(f"unix:{path}")
        with Clients(make) as clients, make() as reader:
            stream = Stream(reader)
            with daemon(tmp_path, *flags, "--takeover", wait=False) as new:
                new.wait_said(f"unix:{path}")
                stream.assert_whole()
                assert old.process.wait(120) == 0
                clients.stop()
                with make() as late:
                    assert late.get("/ready").status_code == 200
        assert not clients.errors


@pytest.mark.slow
def test_a_takeover_with_tls(tmp_path: Path) -> None:
    with certificate(tmp_path) as (key, cert):
        flags = ("--ssl-keyfile", key, "--ssl-certfile", cert, *control(tmp_path))
        context = ssl.create_default_context(cafile=cert)
        with daemon(tmp_path, *flags, wait=False) as old:
            url = old.wait_said("https://127.0.0.1:")

            def make() -> httpx.Client:
                return httpx.Client(base_url=url, verify=context, timeout=60)

            with Clients(make) as clients, make() as reader:
                stream = Stream(reader)
                port = url.rsplit(":", 1)[1]
                with daemon(tmp_path, *flags, "--port", port, "--takeover", wait=False) as new:
                    assert new.wait_said("https://127.0.0.1:") == url
                    stream.assert_whole()
                    assert old.process.wait(120) == 0
                    clients.stop()
            assert not clients.errors


@pytest.mark.slow
def test_a_takeover_without_a_running_daemon_is_an_ordinary_start(tmp_path: Path) -> None:
    with daemon(tmp_path, *control(tmp_path), "--takeover") as running:
        assert running.complete("Once").status_code == 200
        assert running.stop() == 0


def drain(*flags: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([TIERCEL, "drain", *flags], capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_the_verb_drain_ends_a_daemon_when_its_streams_have_ended(tmp_path: Path) -> None:
    path = str(tmp_path / "control")
    with daemon(tmp_path, *control(tmp_path)) as running, tcp_client(running)() as reader:
        stream = Stream(reader)
        told = drain("--control-socket", path)
        assert (told.returncode, told.stderr) == (0, "")
        assert running.http.get("/ready").status_code == 503
        assert running.http.get("/health/live").status_code == 200
        assert drain("--control-socket", path, "--wait").returncode == 0
        assert not Path(f"/proc/{running.process.pid}/exe").exists()
        stream.assert_whole()
        assert running.process.wait(10) == 0
        nobody = drain("--control-socket", path)
        assert nobody.returncode == 1
        assert "no daemon listens on" in nobody.stderr


@pytest.mark.slow
def test_the_control_socket_is_found_by_the_port(tmp_path: Path) -> None:
    variables = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with daemon(tmp_path, *ONE_THREAD, variables=variables) as running:
        command = [TIERCEL, "drain", "--port", port_of(running), "--wait"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **variables})
        assert (told.returncode, told.stderr) == (0, "")
        assert running.process.wait(10) == 0
    assert not list((tmp_path / "tiercel").iterdir())


@pytest.mark.slow
def test_a_daemon_that_is_killed_leaves_a_socket_that_is_replaced(tmp_path: Path) -> None:
    with daemon(tmp_path, *control(tmp_path)) as running:
        running.stop(signal.SIGKILL)
    assert drain("--control-socket", str(tmp_path / "control")).returncode == 1
    with daemon(tmp_path, *control(tmp_path)):
        assert drain("--control-socket", str(tmp_path / "control"), "--wait").returncode == 0


@pytest.mark.slow
def test_the_second_listener_is_taken_over_too(tmp_path: Path) -> None:
    path = tmp_path / "admin"
    flags = (*control(tmp_path), "--admin-uds", str(path))

    def status() -> int:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as http:
            return http.get("/metrics").status_code

    with daemon(tmp_path, *flags) as old:
        assert status() == 200
        with daemon(tmp_path, *flags, "--port", port_of(old), "--takeover"):
            assert old.process.wait(120) == 0
            assert status() == 200

"""Rows 1, 8, 19, 36 and 39 on the real daemon: overload, clients that leave, drains, clocks and descriptors."""

import contextlib
import os
import random
import signal
import socket
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.e2e.daemon import Daemon, daemon
from tests.e2e.prompts import ONE_THREAD, PROMPTS
from tests.faults.streams import Ask, StreamReader, make_asks

QUEUE = 8
SHIM = Path(__file__).with_name("wall_clock.c")
MIB = 1 << 20


def rss_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def wait_for(running: Daemon, metric: str, least: float, patience_s: float = 30.0) -> None:
    end_s = time.monotonic() + patience_s
    while (now := running.metric(metric)) < least:
        assert time.monotonic() < end_s, f"{metric} is {now}, expected at least {least}"
        time.sleep(0.02)


def test_row_01_a_burst_beyond_the_queue_is_refused_and_the_rest_is_served(tmp_path: Path) -> None:
    flags = ("--max-num-queued-reqs", str(QUEUE), "--max-num-seqs", "2", *ONE_THREAD)
    with daemon(tmp_path, *flags) as running:
        busy = [StreamReader.reading(running.url, Ask(f"Once {number}", 2500)) for number in range(2)]
        before_bytes = rss_bytes(running.process.pid)
        queued = [StreamReader(running.url, Ask(f"Later {number}", 5)) for number in range(QUEUE)]
        for reader in queued:
            reader.start()
        wait_for(running, "vllm:num_requests_waiting", QUEUE)
        with ThreadPoolExecutor(2 * QUEUE) as pool:
            refused = list(pool.map(lambda number: running.complete(f"Burst {number}"), range(2 * QUEUE)))
        assert all(reader.heard.finish_reason is None for reader in busy), "the refusals did not come at once"
        for answer in refused:
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "overloaded"
            assert int(answer.headers["retry-after"]) >= 1
        assert rss_bytes(running.process.pid) - before_bytes < 64 * MIB
        assert all(reader.finished().is_complete and not reader.heard.errors for reader in (*busy, *queued))
        assert all(reader.heard.status == 200 for reader in queued)
        running.assert_nothing_held()


def test_row_08_clients_that_leave_swapped_sequences_free_every_block(tmp_path: Path) -> None:
    pools = ("--cpu-device-pool", "--num-gpu-blocks-override", "120", "--kv-host-size", "32M")
    flags = (*pools, "--preemption-mode", "swap", "--max-model-len", "1024", *ONE_THREAD)
    with daemon(tmp_path, *flags) as running:
        clients = [httpx.Client(base_url=running.url, timeout=60) for _ in range(6)]

        def read(client: httpx.Client, prompt: str) -> None:
            body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}
            try:
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    for _ in answer.iter_raw():
                        if has_left.is_set():
                            return
            except httpx.HTTPError:
                pass

        has_left = threading.Event()
        threads = [
            threading.Thread(target=read, args=(client, prompt), daemon=True)
            for client, prompt in zip(clients, PROMPTS, strict=False)
        ]
        for thread in threads:
            thread.start()
        wait_for(running, "vllm:num_preemptions_total", 1)
        wait_for(running, "vllm:num_requests_waiting", 1)
        has_left.set()
        for client in clients:
            client.close()
        running.assert_nothing_held()
        for tier in ("hbm", "ddr"):
            running.wait_metric(f'tiercel_kv_used_bytes{{tier="{tier}"}}', 0.0)
        for thread in threads:
            thread.join(20)
        assert running.stop() == 0


def test_row_19_a_drain_refuses_the_queue_and_finishes_streams(tmp_path: Path) -> None:
    with daemon(tmp_path, "--max-num-seqs", "1", *ONE_THREAD) as running:
        stream = StreamReader.reading(running.url, Ask("Once", 2500))
        with ThreadPoolExecutor(4) as pool:
            queued = [pool.submit(running.complete, f"Later {number}") for number in range(4)]
            wait_for(running, "vllm:num_requests_waiting", 4)
            running.process.send_signal(signal.SIGTERM)
            answers = [future.result() for future in queued]
        assert running.http.get("/ready").status_code == 503
        assert running.http.get("/health/live").status_code == 200
        assert [answer.status_code for answer in answers] == [503] * 4
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
        assert stream.heard.finish_reason is None, "the queue was not refused at once"
        heard = stream.finished()
        assert (heard.is_complete, heard.finish_reason, heard.errors) == (True, "length", [])
        assert running.process.wait(40) == 0


def test_row_36_a_wall_clock_that_jumps_changes_nothing(tmp_path: Path) -> None:
    """The wall clock of HTTP process and engine jumps by an hour, forwards and back, during streams."""
    library, offset = tmp_path / "wall_clock.so", tmp_path / "offset"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, SHIM], check=True)
    offset.write_bytes(bytes(8))
    variables = {"LD_PRELOAD": str(library), "WALL_CLOCK_OFFSET": str(offset)}
    asks = make_asks(random.Random(36), PROMPTS[:2], 2, (300, 400))
    with daemon(tmp_path, *ONE_THREAD, variables=variables) as running:
        expected = [StreamReader.reading(running.url, ask).finished().outcome for ask in asks]
        for hours in (1, -1, 0):
            readers = [StreamReader.reading(running.url, ask) for ask in asks]
            with offset.open("r+b") as file:  # in place: the processes have mapped it
                file.write(struct.pack("<q", 3600 * hours))
            moved_s = running.complete("Now").json()["created"] - time.time()
            assert round(moved_s / 3600) == hours, "the clock of the daemon did not jump"
            assert [reader.finished().outcome for reader in readers] == expected
            assert running.http.get("/health").status_code == 200
        running.assert_nothing_held()
        assert running.stop() == 0


def patient_get(url: str) -> httpx.Response:
    """Repeat a request until it is answered: a client beyond the reserve of connections is reset."""
    end_s = time.monotonic() + 30
    while True:
        try:
            answer = httpx.get(url, timeout=5)
            if answer.status_code == 200 or not url.endswith("/health"):
                return answer
        except httpx.HTTPError:
            pass
        assert time.monotonic() < end_s, f"no answer of {url} at the limit of descriptors"
        time.sleep(0.2)


def test_row_39_more_connections_than_descriptors_get_503_and_no_crash(tmp_path: Path) -> None:
    limit = ("prlimit", "--nofile=256:256")
    flags = ("--timeout-headers", "60", *ONE_THREAD)
    with daemon(tmp_path, *flags, under=limit) as running, contextlib.ExitStack() as closing:
        stream = StreamReader.reading(running.url, Ask("Once", 1500))
        url = httpx.URL(running.url)
        for _ in range(300):
            with contextlib.suppress(OSError):  # the backlog of the kernel may be full
                closing.enter_context(socket.create_connection((url.host, url.port or 0), timeout=1))
        for path, status in (("/health", 200), ("/version", 503), ("/health", 200)):
            answer = patient_get(f"{running.url}{path}")
            assert answer.status_code == status
            assert answer.headers["connection"] == "close"
            if status == 503:
                assert answer.json()["error"]["code"] == "too_many_connections"
                assert "retry-after" in answer.headers
        assert '"code": "too_many_connections"' in running.log.read_text()
        heard = stream.finished()
        assert (heard.is_complete, heard.errors) == (True, [])
        closing.close()
        end_s = time.monotonic() + 30
        while httpx.get(f"{running.url}/health").status_code != 200:
            assert time.monotonic() < end_s
            time.sleep(0.1)
        assert running.complete("Hello").status_code == 200
        assert running.stop() == 0

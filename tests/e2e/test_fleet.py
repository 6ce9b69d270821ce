"""A front with two engines: no stream fails and no text changes, however an engine is lost."""

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.daemon import Daemon, daemon
from tests.e2e.fleet import (
    HostProcess,
    Partition,
    StreamedText,
    draw_bodies,
    engine_host,
    longest_gap_s,
    make_secret,
    stream_all,
    tokens_of,
    undisturbed,
)

STREAMS, TOKENS = 32, 200
STALL_S = 3
EXACT = ("--dtype", "float32", "--threads", "1")
BODIES = draw_bodies(STREAMS, TOKENS)


@dataclass
class Fleet:
    """Two engines, the front, and the answers of the undisturbed fleet."""

    hosts: list[HostProcess]
    front: Daemon
    expected: list[StreamedText]
    folder: Path
    secret: Path

    def assert_right(self, answers: list[StreamedText]) -> None:
        assert not [answer.error for answer in answers if answer.error]
        assert [answer.said for answer in answers] == [answer.said for answer in self.expected]
        print(f"longest gap of a stream: {longest_gap_s(answers):.2f} s")

    def wait_engines(self, count: int, patience_s: float = 60.0) -> None:
        end_s = time.monotonic() + patience_s
        while True:
            states = self.front.http.get("/health").json()["engines"]
            if list(states.values()).count("ready") == count:
                return
            assert time.monotonic() < end_s, states
            time.sleep(0.05)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    secret = make_secret(folder)
    with contextlib.ExitStack() as running:
        hosts = [
            running.enter_context(engine_host(folder, secret, *EXACT, "--stall-timeout", str(STALL_S)))
            for _ in range(2)
        ]
        addresses = [host.wait_ready() for host in hosts]
        front = running.enter_context(
            daemon(
                folder,
                *("--engines", f"static:{','.join(addresses)}", "--engine-secret-file", str(secret)),
                *("--stall-timeout", str(STALL_S)),
            )
        )
        found = Fleet(hosts, front, [], folder, secret)
        found.wait_engines(2)
        found.expected = asyncio.run(stream_all(front.url, BODIES, undisturbed, "undisturbed"))
        assert all(answer.finish_reason == "length" for answer in found.expected)
        yield found


def counted(fleet: Fleet, name: str) -> float:
    """Return a counter of the engines, summed."""
    lines = fleet.front.http.get("/metrics").text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"tiercel_fleet_engine_{name}_total{{")
    )


@pytest.mark.slow
def test_turns_of_conversations_find_what_their_engine_has_and_keys_take_few_bytes(fleet: Fleet) -> None:
    """Eight conversations in turns: a choice that knows nothing of prefixes finds half of them."""
    names = ("received_bytes", "sent_bytes", "key_bytes")
    before = {name: counted(fleet, name) for name in names}
    talks = [f"Conversation {number}. " + "Tell me about the fox and the hen. " * 12 for number in range(8)]
    turns = found = 0
    for turn in range(6):
        for number, talk in enumerate(talks):
            body = {"prompt": talk, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
            answer = fleet.front.http.post("/v1/completions", json=body).raise_for_status().json()
            talks[number] = f"{talk}{answer['choices'][0]['text']} And then, in chapter {turn}, what did they do? "
            if turn:
                turns += 1
                found += answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    took = {name: counted(fleet, name) - before[name] for name in names}
    share = took["key_bytes"] / (took["received_bytes"] + took["sent_bytes"])
    print(f"found {found} of {turns} turns; keys are {100 * share:.2f} % of the bytes of the wire")
    assert found >= 0.85 * turns
    assert took["key_bytes"]
    assert share <= 0.01


@pytest.mark.slow
def test_both_engines_get_requests(fleet: Fleet) -> None:
    lines = fleet.front.http.get("/metrics").text.splitlines()
    steps = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("tiercel_fleet_engine_steps_total{")]
    assert len(steps) == 2
    assert min(steps) > TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.long)])
def test_kills_fail_no_stream_and_change_no_text(fleet: Fleet, kills: int) -> None:
    rng = random.Random(kills)
    done = 0

    async def kill(answers: list[StreamedText]) -> None:
        """Kill an engine that serves at random times; the other one serves then."""
        nonlocal done
        while done < kills and any(answer.finish_reason is None for answer in answers):
            await asyncio.to_thread(fleet.wait_engines, 2)
            await asyncio.sleep(rng.uniform(0.1, 0.6))
            if all(answer.finish_reason for answer in answers):
                return
            await asyncio.to_thread(rng.choice(fleet.hosts).signal_engine, signal.SIGKILL)
            done += 1
            await asyncio.sleep(0.2)

    turn = 0
    while done < kills:
        turn += 1
        fleet.assert_right(asyncio.run(stream_all(fleet.front.url, BODIES, kill, f"kills-{kills}-{turn}")))
    fleet.wait_engines(2)
    assert all(host.process.poll() is None for host in fleet.hosts)
    fleet.front.assert_nothing_held()


@pytest.mark.slow
def test_a_stopped_engine_is_replaced_by_its_host(fleet: Fleet) -> None:
    async def stop(answers: list[StreamedText]) -> None:
        await tokens_of(answers, STREAMS * 20)
        await asyncio.to_thread(fleet.hosts[0].signal_engine, signal.SIGSTOP)

    fleet.assert_right(asyncio.run(stream_all(fleet.front.url, BODIES, stop, "stopped-engine")))
    fleet.wait_engines(2)


@pytest.mark.slow
def test_a_stopped_host_is_left_and_used_again(fleet: Fleet) -> None:
    """The host and its engine are stopped, as on a frozen machine; what they send afterwards is of no use."""

    async def stop(answers: list[StreamedText]) -> None:
        await tokens_of(answers, STREAMS * 20)
        fleet.hosts[1].process.send_signal(signal.SIGSTOP)

    try:
        fleet.assert_right(asyncio.run(stream_all(fleet.front.url, BODIES, stop, "stopped-host")))
    finally:
        fleet.hosts[1].process.send_signal(signal.SIGCONT)
    fleet.wait_engines(2)
    fleet.assert_right(asyncio.run(stream_all(fleet.front.url, BODIES, undisturbed, "continued-host")))


@pytest.mark.slow
def test_a_killed_host_ends_its_engine_and_may_return(fleet: Fleet) -> None:
    address = fleet.hosts[1].wait_ready()

    async def kill(answers: list[StreamedText]) -> None:
        await tokens_of(answers, STREAMS * 20)
        fleet.hosts[1].process.kill()

    fleet.assert_right(asyncio.run(stream_all(fleet.front.url, BODIES, kill, "killed-host")))
    fleet.hosts[1].process.wait()
    with engine_host(fleet.folder, fleet.secret, *EXACT, listen=address) as again:
        again.wait_ready()
        fleet.wait_engines(2)
        fleet.assert_right(asyncio.run(stream_all(fleet.front.url, BODIES, undisturbed, "new-host")))
        again.process.terminate()
        assert again.process.wait(60) == 0
        fleet.wait_engines(1)


@pytest.mark.slow
def test_a_partition_fails_no_stream_and_its_late_tokens_are_dropped(tmp_path: Path) -> None:
    """The front loses one engine without the end of a connection. When bytes flow again they are of no use."""
    secret = make_secret(tmp_path)

    async def scene() -> None:
        with engine_host(tmp_path, secret, *EXACT) as one, engine_host(tmp_path, secret, *EXACT) as two:
            addresses = [await asyncio.to_thread(host.wait_ready) for host in (one, two)]
            async with Partition(addresses[1]).running() as proxy:
                engines = f"static:{addresses[0]},{proxy.address}"
                flags = ("--engines", engines, "--engine-secret-file", str(secret), "--stall-timeout", str(STALL_S))
                with daemon(tmp_path, *flags, wait=False) as front:
                    await asyncio.to_thread(front.wait_ready)
                    fleet = Fleet([one, two], front, [], tmp_path, secret)
                    await asyncio.to_thread(fleet.wait_engines, 2)
                    fleet.expected = await stream_all(front.url, BODIES, undisturbed, "whole")

                    async def part(answers: list[StreamedText]) -> None:
                        await tokens_of(answers, STREAMS * 20)
                        proxy.part()
                        await asyncio.to_thread(fleet.wait_engines, 1)
                        await asyncio.sleep(0.2)
                        proxy.heal()

                    fleet.assert_right(await stream_all(front.url, BODIES, part, "parted"))
                    await asyncio.to_thread(fleet.wait_engines, 2)
                    fleet.assert_right(await stream_all(front.url, BODIES, undisturbed, "healed"))
                    await asyncio.to_thread(front.assert_nothing_held)

    asyncio.run(scene())


@pytest.mark.slow
def test_a_drained_front_ends_its_streams_and_leaves_the_engines(tmp_path: Path) -> None:
    secret = make_secret(tmp_path)
    with engine_host(tmp_path, secret, *EXACT) as host:
        flags = ("--engines", f"static:{host.wait_ready()}", "--engine-secret-file", str(secret))
        with daemon(tmp_path, *flags) as first, daemon(tmp_path, *flags) as second:
            expected = asyncio.run(stream_all(second.url, BODIES[:4], undisturbed, "alone"))

            async def drain(answers: list[StreamedText]) -> None:
                await tokens_of(answers, 40)
                first.process.send_signal(signal.SIGTERM)

            answers = asyncio.run(stream_all(first.url, BODIES[:4], drain, "drained"))
            assert [answer.said for answer in answers] == [answer.said for answer in expected]
            assert first.process.wait(40) == 0
            assert host.process.poll() is None
            again = asyncio.run(stream_all(second.url, BODIES[:4], undisturbed, "after"))
            assert [answer.said for answer in again] == [answer.said for answer in expected]


@pytest.mark.slow
def test_two_fronts_keep_the_limits_of_a_tenant_together(tmp_path: Path) -> None:
    secret, key, tenants = make_secret(tmp_path), "acme-key-0123456789", tmp_path / "tenants.yaml"
    tenants.write_text(f"tenants:\n  - {{name: acme, key: {key}, requests_per_minute: 20}}\n", encoding="utf-8")
    tenants.chmod(0o600)
    with engine_host(tmp_path, secret, *EXACT) as host:
        flags = ("--engines", f"static:{host.wait_ready()}", "--engine-secret-file", str(secret))
        flags = (*flags, "--tenants-config", str(tenants))
        with daemon(tmp_path, *flags) as first, daemon(tmp_path, *flags) as second:
            time.sleep(1)  # they have heard of each other
            statuses: list[int] = []
            for _ in range(60):
                for front in (first, second):
                    body = {"prompt": "a", "max_tokens": 1}
                    head = {"authorization": f"Bearer {key}"}
                    statuses.append(front.http.post("/v1/completions", json=body, headers=head).status_code)
                time.sleep(0.05)
            assert set(statuses) == {200, 429}
            # Each alone would allow 20, and what flows in: one request in three seconds.
            assert 18 <= statuses.count(200) <= 28

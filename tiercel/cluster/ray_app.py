"""The application of Ray Serve: `serve run tiercel.cluster.ray_app:app model=/models/Llama-3-8B secret_file=...`.

Ray places processes, restarts them and decides how many there are. Each actor runs the daemon's own program beside
itself. Clients speak to the fronts' ports, and fronts to engines: no token passes through Ray, whose streaming costs
more than a step above 32 streams (https://github.com/ray-project/ray/issues/52746). Serve asks for an actor's health
every second; the check also exchanges addresses and predicted work with the Directory.
"""

# pyright: reportMissingImports=false, reportFunctionMemberAccess=false
# Ray is an extra, and the types of this file are looked at without it, too.

import asyncio
import logging
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address

from tiercel.cluster.child import BoundChild
from tiercel.cluster.directory import EngineDirectory
from tiercel.cluster.fleet_args import FleetArgs
from tiercel.cluster.scaling import METRIC, WorkPolicy
from tiercel.settings.engine_address import EngineAddress

TIERCEL = str(Path(sys.executable).with_name("tiercel"))
_ROUND_S = 1.0
_PATIENCE_S = 5.0  # maximum wait for an answer of the directory or a front; a later answer is ignored
_LOAD_S = 1800.0  # for an engine to load its weights and measure itself
_SILENT_ROUNDS = 6
_MARGIN_S = 15.0  # for an engine to write its cache after the drain, before Ray kills the actor
_WORK = "tiercel_fleet_engine_work_seconds{"

log = logging.getLogger("ray.serve")


class Directory:
    """The addresses of engines, for all fronts. After a restart the engines announce themselves within a second."""

    def __init__(self) -> None:
        self._engines = EngineDirectory()

    async def announce(self, address: str) -> None:
        """Note that an engine lives."""
        self._engines.announce(address, time.monotonic())

    async def withdraw(self, address: str) -> None:
        """Forget an engine."""
        self._engines.withdraw(address)

    async def exchange(self, front: str, work_s: float | None) -> tuple[str, ...]:
        """Note the work that a front expects, if known; return the addresses of the engines."""
        if work_s is not None:
            self._engines.report(front, work_s, time.monotonic())
        return self._engines.addresses(time.monotonic())

    async def work_s(self) -> float | None:
        """Return the seconds of one engine that all fronts expect; None if no front has reported lately."""
        return self._engines.work_s(time.monotonic())


class HostActor:
    """One `tiercel engine`."""

    async def __init__(self, args: FleetArgs, directory: DeploymentHandle) -> None:
        self._directory = directory
        self._drain_s = args.drain_s
        self._address: str | None = None
        listen = str(EngineAddress(get_node_ip_address() if args.several_machines else "127.0.0.1", 0))
        flags = ["--listen", listen, *_common_flags(args), *args.engine_flags]
        if args.engine_cpus >= 1 and not any(flag.startswith("--threads") for flag in args.engine_flags):
            flags += ["--threads", str(int(args.engine_cpus))]  # the default is all cores of the machine
        self._child = BoundChild([TIERCEL, "engine", *flags], r"tiercel engine serves .* at (\S+)")
        # In a thread: the actor may be stopped while the engine loads.
        self._address = await asyncio.to_thread(self._child.wait_announced, _LOAD_S)

    async def check_health(self) -> None:
        """Announce the engine; raise if it has ended. A failed announcement does not make the engine unhealthy."""
        if not self._child.is_alive:
            raise RuntimeError(f"the engine at {self._address} has ended")
        if self._address is not None:
            await _bounded(self._directory.announce.remote(self._address))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report the work that all fronts expect, which is what the policy scales on."""
        work_s = await _bounded(self._directory.work_s.remote())
        return {} if work_s is None else {METRIC: work_s}

    async def __del__(self) -> None:
        """Drain. The fronts move what has not ended by then."""
        if self._address is not None:
            await _bounded(self._directory.withdraw.remote(self._address))
        await asyncio.to_thread(self._child.stop, self._drain_s + _MARGIN_S)


class Front:
    """One `tiercel serve`, to whose port clients connect. Serve's own proxy is not used."""

    def __init__(self, args: FleetArgs, directory: DeploymentHandle, engines: DeploymentHandle) -> None:
        del engines  # named so that Serve deploys them with the front
        self._directory = directory
        self._drain_s = args.drain_s
        self._folder = tempfile.TemporaryDirectory(prefix="tiercel-front-")
        self._file = Path(self._folder.name, "engines")
        self._file.write_text("")
        self._name = secrets.token_hex(8)
        self._silent_rounds = 0
        flags = ["--engines", f"file:{self._file}", "--host", args.front_host, "--port", str(args.front_port)]
        command = [TIERCEL, "serve", *flags, *_common_flags(args), *args.front_flags]
        self._child = BoundChild(command, r"tiercel serves .* at (http\S+)")  # says so when an engine is ready

    async def check_health(self) -> None:
        """Tell the front where the engines are, and the directory what the front expects.

        Errors: RuntimeError if the front has ended, or has not answered for `_SILENT_ROUNDS` rounds.
        """
        if not self._child.is_alive:
            raise RuntimeError("the front has ended")
        work_s = await self._read_work_s()
        self._silent_rounds = 0 if work_s is not None or self._child.announced is None else self._silent_rounds + 1
        if self._silent_rounds >= _SILENT_ROUNDS:
            raise RuntimeError(f"the front at {self._child.announced} has not answered {_SILENT_ROUNDS} times")
        found = await _bounded(self._directory.exchange.remote(self._name, work_s))
        if found:  # a directory that has just been restarted knows nothing yet
            fresh = self._file.with_suffix(".new")
            fresh.write_text("".join(f"{address}\n" for address in found))
            fresh.replace(self._file)

    async def _read_work_s(self) -> float | None:
        """Return the predicted seconds of work at all engines; None if /metrics cannot be read."""
        url = self._child.announced
        if url is None:
            return None
        try:
            # A certificate of the front need not name the address by which this machine reaches itself.
            async with httpx.AsyncClient(timeout=_PATIENCE_S, trust_env=False, verify=False) as http:  # noqa: S501
                lines = (await http.get(f"{url}/metrics")).raise_for_status().text.splitlines()
        except httpx.HTTPError as error:
            log.warning("no metrics of the front: %s", error)
            return None
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(_WORK))

    async def __del__(self) -> None:
        """Drain: streams may end."""
        await asyncio.to_thread(self._child.stop, self._drain_s + _MARGIN_S)
        self._folder.cleanup()


def _common_flags(args: FleetArgs) -> list[str]:
    drain = ["--shutdown-timeout", f"{args.drain_s:g}"]
    return ["--model", args.model, "--engine-secret-file", args.secret_file, *drain]


async def _bounded(answer: Any) -> Any:  # Any: what a handle of Ray returns has no type
    """Return an actor's answer, or None if it is late or the actor is gone."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await answer
    except Exception as error:  # Ray documents no common exception for a dead actor
        log.warning("the directory does not answer: %s", error)
        return None


def app(args: FleetArgs) -> Application:
    """Build the application. Errors: pydantic's ValidationError, which names the argument."""
    stopping_s = args.drain_s + _MARGIN_S + _PATIENCE_S
    common = {"health_check_period_s": _ROUND_S, "health_check_timeout_s": 60, "graceful_shutdown_wait_loop_s": 0.1}
    policy = AutoscalingPolicy(policy_function=WorkPolicy, policy_kwargs={"goal_s": args.goal_s})
    scaling = AutoscalingConfig(
        min_replicas=args.least_engines,
        max_replicas=args.most_engines,
        metrics_interval_s=_ROUND_S,
        look_back_period_s=5.0,
        upscale_delay_s=0,  # an engine needs long enough to load
        downscale_delay_s=args.calm_s,
        policy=policy,
    )
    directory = (
        serve.deployment(name="Directory")(Directory).options(ray_actor_options={"num_cpus": 0}, **common).bind()
    )
    engines = (
        serve.deployment(HostActor)
        .options(
            name="EngineHost",
            autoscaling_config=scaling,
            ray_actor_options={"num_cpus": args.engine_cpus, "num_gpus": args.engine_gpus},
            graceful_shutdown_timeout_s=stopping_s,
            **common,
        )
        .bind(args, directory)
    )
    return (
        serve.deployment(Front)
        .options(
            num_replicas=args.fronts,
            max_replicas_per_node=1,  # each has the same port
            ray_actor_options={"num_cpus": args.front_cpus},
            graceful_shutdown_timeout_s=stopping_s,
            **common,
        )
        .bind(args, directory, engines)
    )

"""The workloads W1 to W4 on tiercel and on its peers, on this machine, in one run.

    python benchmarks/cpu/workloads.py --model MODELS/qwen05b --peers PEERS [--servers tiercel,vllm] [--rounds 3]
        [--quantization int8|int4]

PEERS is the folder that `install.sh` makes, the model comes from `make_models.py`; `scenarios.py` describes the
workloads. All servers are started once, and those that are not being measured are paused. Each round runs every
workload on every server, one server after the other, with the same new prompts. The first round includes all servers,
the following ones tiercel and the two best peers of each workload. The figures are medians over the rounds; the ratios
are those of tiercel to the best peer. The processor's class decides which promises (`promises.py`) are judged.

Prints the table in Markdown and writes all figures to --out. Exit code 1 if a promise is broken, 2 if a server did not
start or gave answers of other lengths than requested; the other servers are measured nevertheless.
"""

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import msgspec

from benchmarks.cpu import process_tree
from benchmarks.cpu.client import connected
from benchmarks.cpu.processor import read_processor
from benchmarks.cpu.promises import JUDGED_BY_WORKLOAD, exit_code
from benchmarks.cpu.prompts import Prompts
from benchmarks.cpu.refusal import EXIT_REFUSED, refuse
from benchmarks.cpu.report import judgements_of, tables
from benchmarks.cpu.results import OURS, TrialResult, WorkloadResults, chosen_peers, write_results
from benchmarks.cpu.running import RunningServer, ServerFault
from benchmarks.cpu.scenarios import (
    QUICK_SIZE_BY_WORKLOAD,
    SIZE_BY_WORKLOAD,
    Trial,
    WorkloadFault,
    run_workload,
)
from benchmarks.cpu.servers import GGUF_TYPES, Place, Server, find_servers, installed
from benchmarks.cpu.versions import own_versions, peer_version

_QUIET_CORES = 0.12  # busy with other programs; more than that, and the trial is repeated
_SETTLE_S = 1.0  # for a server to notice that connections were closed
_SPARE_BYTES = 1 << 30  # of free memory that must be left while all servers run


class Workshop:
    """Runs trials on running servers and measures their memory and the CPU time of other programs."""

    def __init__(
        self, prompts: Prompts, seed: str, note: Callable[[str], None], *, retries: int, is_quick: bool
    ) -> None:
        self._prompts = prompts
        self._seed = seed
        self._sizes = QUICK_SIZE_BY_WORKLOAD if is_quick else SIZE_BY_WORKLOAD
        self._retries = retries
        self._note = note
        self.faults: list[str] = []  # of all trials

    def note_fault(self, text: str) -> None:
        """Note that something could not be measured."""
        self.faults.append(text)
        self._note(text)

    def measure(self, running: RunningServer, workload: str, round_number: int) -> TrialResult:
        """Run one workload once, and again if other programs disturbed it. Errors: WorkloadFault."""
        key = f"{self._seed}/{workload}/{round_number}"
        result = self._try(running, workload, key, round_number)
        for retry in range(self._retries):
            if result.other_cores <= _QUIET_CORES:
                break
            self._note(f"{result.other_cores:.2f} cores are busy elsewhere: {workload} is repeated")
            again = self._try(running, workload, f"{key}/{retry}", round_number)
            result = min(result, again, key=lambda one: one.other_cores)
        return msgspec.structs.replace(result, is_disturbed=result.other_cores > _QUIET_CORES)

    def _try(self, running: RunningServer, workload: str, key: str, round_number: int) -> TrialResult:
        name, pids = running.server.name, process_tree.tree(running.pid)
        busy_s, server_s, own_s, start_s = self._clocks(pids)
        try:
            figures = asyncio.run(self._run(running.server, workload, key))
        except (WorkloadFault, httpx.HTTPError) as exc:
            self.note_fault(f"{name}, {workload}: {exc}")
            raise WorkloadFault(str(exc)) from exc
        pids = process_tree.tree(running.pid)
        after = self._clocks(pids)
        wall_s = after[3] - start_s
        memory = process_tree.memory(pids)
        time.sleep(_SETTLE_S)
        others_s = (after[0] - busy_s) - (after[1] - server_s) - (after[2] - own_s)
        return TrialResult(
            server=name,
            workload=workload,
            round=round_number,
            figures=figures,
            server_cores=round((after[1] - server_s) / wall_s, 2),
            client_cores=round((after[2] - own_s) / wall_s, 3),
            other_cores=round(max(0.0, others_s / wall_s), 2),
            resident_bytes=memory.resident,
            kv_bytes=memory.kv,
        )

    async def _run(self, server: Server, workload: str, key: str) -> dict[str, float]:
        async with connected(server.url) as client:
            return await run_workload(workload, self._sizes[workload], Trial(client, self._prompts, key))

    @staticmethod
    def _clocks(pids: list[int]) -> tuple[float, float, float, float]:
        return process_tree.machine_busy_s(), process_tree.cpu_s(pids), time.process_time(), time.monotonic()


def run_rounds(
    servers: list[RunningServer], workloads: list[str], rounds: int, workshop: Workshop
) -> Iterator[TrialResult]:
    """Yield the results of all rounds. Servers are paused except during their trials."""
    results: list[TrialResult] = []
    by_name = {running.server.name: running for running in servers}
    for running in servers:
        running.pause()
    for number in range(rounds):
        for workload in workloads:
            names = list(by_name) if number == 0 else chosen_peers(results, workload)
            turn = number % max(1, len(names))
            for name in names[turn:] + names[:turn]:
                running = by_name[name]
                running.resume()
                with contextlib.suppress(WorkloadFault):
                    results.append(workshop.measure(running, workload, number))
                    yield results[-1]
                running.pause()


def run_restarted(
    servers: list[RunningServer], workloads: list[str], rounds: int, workshop: Workshop
) -> Iterator[TrialResult]:
    """Yield the results of all rounds, with every server started anew for each round, when memory is short."""
    results: list[TrialResult] = []
    for number in range(rounds):
        wanted = {workload: chosen_peers(results, workload) if number else None for workload in workloads}
        for running in servers:
            name = running.server.name
            mine = [workload for workload, names in wanted.items() if names is None or name in names]
            if not mine:
                continue
            with running_or_noted(running, workshop) as is_running:
                for workload in mine if is_running else []:
                    with contextlib.suppress(WorkloadFault):
                        results.append(workshop.measure(running, workload, number))
                        yield results[-1]


@contextlib.contextmanager
def running_or_noted(running: RunningServer, workshop: Workshop) -> Iterator[bool]:
    """Run a server until the block ends. Yield whether it runs; the fault of one that does not is noted."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(running)
        except ServerFault as exc:
            workshop.note_fault(str(exc))
            yield False
        else:
            _note(f"{running.server.name} answers")
            yield True


def main() -> int:
    arguments = _parse()
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(EXIT_REFUSED))  # the servers are stopped, too
    kind = read_processor(os.environ.get("TIERCEL_CPU_CLASS"))
    place = Place(
        model=arguments.model.resolve(),
        peers=arguments.peers.resolve(),
        tiercel=arguments.tiercel.resolve() if arguments.tiercel else None,
        first_port=arguments.port,
        threads=arguments.threads or kind.threads,
        kind=kind.kind,
        flags=dict(arguments.flags),
        quantization=arguments.quantization,
    )
    names = arguments.servers or installed(place.peers)
    if place.quantization and not arguments.servers:
        names = [name for name in names if name in ("tiercel", "llamacpp")]
    model = f"{place.model.name}-{place.quantization}" if place.quantization else place.model.name
    servers = find_servers(place, names)
    arguments.out.mkdir(parents=True, exist_ok=True)
    prompts = Prompts.of_model(place.model)
    retries = 0 if arguments.quick else arguments.retries
    workshop = Workshop(prompts, arguments.seed, _note, retries=retries, is_quick=arguments.quick)
    running = [RunningServer(server, arguments.out / f"{server.name}.log", arguments.nice) for server in servers]
    results = WorkloadResults(
        model=model,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=sys.argv,
        processor=kind,
        threads=place.threads,
        is_quick=arguments.quick,
        versions=own_versions(place.tiercel)
        | {name: peer_version(place.peers, name) for name in names if name != OURS},
        trials=[],
    )
    path = arguments.out / f"workloads-{model}.json"
    with contextlib.ExitStack() as stack:
        if arguments.restart:
            trials = run_restarted(running, arguments.workloads, arguments.rounds, workshop)
        else:
            started = [one for one in running if stack.enter_context(running_or_noted(one, workshop))]
            _check_memory()
            trials = run_rounds(started, arguments.workloads, arguments.rounds, workshop)
        for trial in trials:
            results.trials.append(trial)
            _note(trial.line())
            write_results(path, results)
    print("\n".join(tables([results])))
    _note(f"results: {path}")
    return EXIT_REFUSED if workshop.faults else exit_code(judgements_of([results]))


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check_memory() -> None:
    """Errors: SystemExit if so little memory is left that the system would swap or kill a server."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    if free < _SPARE_BYTES:
        refuse("less than 1 GiB of memory is free with all servers running: use --restart or fewer --servers")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder made by make_models.py")
    parser.add_argument("--peers", type=Path, required=True, help="folder made by install.sh")
    parser.add_argument("--out", type=Path, default=Path("results-cpu"), help="folder for results and logs")
    parser.add_argument("--servers", type=_words, help="servers, with commas; default: all that are installed")
    parser.add_argument("--workloads", type=_words, default=list(JUDGED_BY_WORKLOAD), help="with commas; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--retries", type=int, default=1, help="of a trial that other programs disturb")
    parser.add_argument("--tiercel", type=Path, help="checkout of tiercel with its .venv, instead of the installed one")
    parser.add_argument("--flags", type=_flags, action="append", default=[], metavar="SERVER=FLAGS",
                        help="more flags of a server, as in --flags 'tiercel=--dtype float32'")  # fmt: skip
    parser.add_argument("--quantization", choices=list(GGUF_TYPES), help="of the weights of tiercel and llama.cpp")
    parser.add_argument("--threads", type=int, help="of each server; default: every core")
    parser.add_argument("--port", type=int, default=8010, help="of the first server; the others take the next ones")
    parser.add_argument("--nice", type=int, default=0, help="priority of the servers; below 0 only for root")
    parser.add_argument("--restart", action="store_true", help="start servers anew each round, when memory is short")
    parser.add_argument("--seed", default=str(time.time_ns()), help="of the prompts; default: new ones each time")
    parser.add_argument("--quick", action="store_true", help="small sizes, which check the set-up and judge nothing")
    arguments = parser.parse_args()
    if unknown := set(arguments.workloads) - set(JUDGED_BY_WORKLOAD):
        parser.error(f"--workloads: {', '.join(sorted(unknown))} unknown; known are {', '.join(JUDGED_BY_WORKLOAD)}")
    return arguments


def _words(text: str) -> list[str]:
    return text.split(",")


def _flags(text: str) -> tuple[str, list[str]]:
    name, mark, flags = text.partition("=")
    if not mark:
        raise argparse.ArgumentTypeError(f"{text!r} is not SERVER=FLAGS")
    return name, shlex.split(flags)


if __name__ == "__main__":
    sys.exit(main())

"""The results of `workloads.py` and `kernels.py` as they stand in their files."""

import statistics
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.cpu.processor import Processor
from benchmarks.cpu.promises import JUDGED_BY_WORKLOAD, LOWER_IS_BETTER, best_peer
from benchmarks.cpu.refusal import refuse

OURS = "tiercel"
_MOST_PEERS = 2  # in the rounds after the first


class TrialResult(Struct, frozen=True, kw_only=True):
    """One run of one workload on one server."""

    server: str
    workload: str
    round: int
    figures: dict[str, float]
    server_cores: float  # busy on average
    client_cores: float
    other_cores: float  # busy with other programs
    resident_bytes: int  # of all processes of the server, at the end
    kv_bytes: int  # of these, of tiercel's KV pool
    is_disturbed: bool = False

    def line(self) -> str:
        """Return one line for the terminal."""
        shown = " ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
        cores = f"cores {self.server_cores:.2f} + {self.other_cores:.2f} elsewhere"
        return f"{self.round} {self.workload:3} {self.server:9} {shown} | {cores}" + " DISTURBED" * self.is_disturbed


class WorkloadResults(Struct, kw_only=True, tag="workloads"):
    """All trials of one model on one machine."""

    model: str
    date: str  # UTC
    command: list[str]
    processor: Processor
    threads: int
    is_quick: bool  # small sizes that only check the set-up
    versions: dict[str, str]
    trials: list[TrialResult]

    def servers(self) -> list[str]:
        """Return the servers in the order of their first trials."""
        return list(dict.fromkeys(trial.server for trial in self.trials))

    def medians(self, workload: str, figure: str) -> dict[str, float]:
        """Return the median over the rounds by server; quiet rounds only, if there are any."""
        found: dict[str, float] = {}
        for server in self.servers():
            mine = [one for one in self.trials if (one.server, one.workload) == (server, workload)]
            quiet = [one for one in mine if not one.is_disturbed] or mine
            if quiet:
                found[server] = statistics.median(one.figures[figure] for one in quiet)
        return found

    def disturbed(self, workload: str) -> int:
        """Return the number of trials of a workload during which other programs were busy."""
        return sum(trial.is_disturbed for trial in self.trials if trial.workload == workload)

    def memory_gb(self, server: str) -> float:
        """Return the largest resident memory of a server less KV, in 10**9 bytes."""
        sizes = [trial.resident_bytes - trial.kv_bytes for trial in self.trials if trial.server == server]
        return max(sizes) / 1e9

    def ratio(self, workload: str, figure: str) -> tuple[float, str] | None:
        """Return our median over that of the best peer, and the peer. None if one of the two was not measured."""
        medians = self.medians(workload, figure)
        ours = medians.pop(OURS, None)
        best = best_peer(figure, medians)
        return None if ours is None or best is None else (ours / best[1], best[0])

    def values(self) -> dict[str, float]:
        """Return the figures that promises judge, by name. None of them from small sizes."""
        if self.is_quick:
            return {}
        found: dict[str, float] = {}
        for workload, figures in JUDGED_BY_WORKLOAD.items():
            for figure in figures:
                if (ratio := self.ratio(workload, figure)) is not None:
                    found[f"{self.model}.{workload}.{figure}.ratio"] = ratio[0]
        if OURS in self.servers():
            found[f"{self.model}.memory_gb"] = self.memory_gb(OURS)
        return found


class KernelRow(Struct, frozen=True, kw_only=True):
    """One measured kernel."""

    name: str  # dotted: linear.qwen05b.M16, attention.llama1b.4096, prefill.qwen05b
    unit: str
    values: dict[str, float]  # by implementation, such as ours, onednn, torch
    share: float  # of the limit, by ours
    limit: str  # the limit's name in `limits`


class KernelResults(Struct, kw_only=True, tag="kernels"):
    """The limits of a machine, and kernels measured against them in the same run."""

    date: str
    command: list[str]
    processor: Processor
    threads: int
    versions: dict[str, str]
    limits: dict[str, float]  # GB/s and GFLOP/s
    rows: list[KernelRow]

    def values(self) -> dict[str, float]:
        """Return the figures that promises judge: the worst share of each kind."""
        found: dict[str, float] = {}
        for kind in ("prefill", "attention"):
            shares = [row.share for row in self.rows if row.name.startswith(f"{kind}.")]
            if shares:
                found[f"{kind}.share"] = min(shares)
        return found


Results = WorkloadResults | KernelResults


def chosen_peers(trials: list[TrialResult], workload: str) -> list[str]:
    """Return tiercel and the best peers of a workload, by each of its judged figures, from the first round."""
    first = [trial for trial in trials if trial.workload == workload and trial.round == 0]
    orders = [
        sorted(
            (trial for trial in first if trial.server != OURS),
            key=lambda trial, figure=figure: trial.figures[figure] * (1 if figure in LOWER_IS_BETTER else -1),
        )
        for figure in JUDGED_BY_WORKLOAD[workload]
    ]
    ranked = dict.fromkeys(trial.server for place in zip(*orders, strict=True) for trial in place)
    chosen = set(list(ranked)[:_MOST_PEERS]) | {OURS}
    return [trial.server for trial in first if trial.server in chosen]


def write_results(path: Path, results: Results) -> None:
    """Write the file."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def read_results(path: Path) -> Results:
    """Read a file. Errors: SystemExit that names the file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except (OSError, msgspec.MsgspecError) as exc:
        refuse(f"{path}: {exc}")

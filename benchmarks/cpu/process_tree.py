"""A process and its descendants: their memory, their CPU time, pausing them. Linux only."""

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_KV_MAPPING = "/memfd:tiercel-kv"  # the KV pool of tiercel, see server/engine/inherited.py


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory in bytes. Pages that several processes share are counted once."""

    resident: int
    kv: int  # of these, of tiercel's KV pool; 0 for other servers


def tree(pid: int) -> list[int]:
    """Return the process and its living descendants, parents first."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for parent in found:  # grows while it is read
        found += children.get(parent, [])
    return found


def memory(pids: list[int]) -> Memory:
    """Return the memory of these processes. Source: proc(5), proportional set sizes in smaps."""
    resident = kv = 0
    for pid in pids:
        is_kv = False
        for line in _read(_PROC / str(pid) / "smaps").splitlines():
            name = line.partition(" ")[0]
            if "-" in name:  # the head of a mapping: its range of addresses
                is_kv = _KV_MAPPING in line
            elif name == "Pss:":
                size = int(line.split()[1]) * 1024
                resident += size
                kv += size if is_kv else 0
    return Memory(resident, kv)


def cpu_s(pids: list[int]) -> float:
    """Return the CPU time of these processes, without that of their ended children."""
    return sum(int(fields[11]) + int(fields[12]) for pid in pids if (fields := _stat(pid))) / _TICKS_PER_S


def machine_busy_s() -> float:
    """Return the CPU time that all cores have been busy."""
    fields = [int(field) for field in _read(_PROC / "stat").split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS_PER_S  # idle and iowait


def pause(pid: int) -> None:
    """Stop the processes of a tree until `resume`."""
    _signal(tree(pid), signal.SIGSTOP)


def resume(pid: int) -> None:
    """Continue the processes of a tree, descendants first."""
    _signal(tree(pid)[::-1], signal.SIGCONT)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _stat(pid: int) -> list[str]:
    """Return the fields of a process after its name: state, parent, and so on; empty if it has ended."""
    return _read(_PROC / str(pid) / "stat").rpartition(")")[2].split()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

"""The sections of a run in order, with their subjects and budgets."""

from dataclasses import dataclass

QUICK_SHARE = 0.4  # of the budgets, with --quick
MAX_S = 475.0  # of a whole run


@dataclass(frozen=True, slots=True)
class Section:
    """A section. Its module has a function `run(bench)`, which runs in a process of its own."""

    name: str
    about: str
    budget_s: float
    is_extra: bool = False  # runs only if it is named
    needs_peer: bool = False

    @property
    def module(self) -> str:
        """The name of the module."""
        return f"benchmarks.gpu.{self.name}"

    def seconds(self, *, is_quick: bool) -> float:
        """Return the budget in seconds for this run."""
        return self.budget_s * (QUICK_SHARE if is_quick else 1.0)


SECTIONS = (
    Section("kernels", "every kernel against float32 on random ragged shapes", 60),
    Section("limits", "products at the model's shapes in every way, a device copy", 20),
    Section("copies", "between host and device by size of the piece, one way and both", 30),
    Section("attention", "decode and prefill: bytes/s, FLOP/s, share of the limit", 30),
    Section("throughput", "the engine without HTTP, saturated, four mixes of lengths", 120),
    Section("decode", "the engine at batch 1, 32, 256 against the serial bound", 45),
    Section("swap", "steps beside copies, and a preempted sequence back", 45),
    Section("streams", "64 streams over HTTP: time outside the model", 45),
    Section("overlap", "halves of steps as built; halves and prefill beside decode on disjoint processors", 35),
    Section("layout", "block-first against layer-first, block sizes, tiles", 30),
    Section("quantized", "weights of 4 and 8 bits beside bfloat16: steps, products, tiles", 120, is_extra=True),
    Section("disk", "the SSD tier through its own threads", 15),
    Section("replay", "context switches under changing priorities, on the device", 90, is_extra=True),
    Section("switches", "context switches, simulated, at the measured speed of copies; no GPU", 240, is_extra=True),
    Section("peer", "vLLM on the same requests, in two configurations", 420, needs_peer=True),
)


def choose(names: str | None, *, has_peer: bool) -> list[Section]:
    """Return the sections of a comma-separated list, in the order of the catalogue; without names all that can run.

    Errors: ValueError naming a section that does not exist.
    """
    if names is None:
        return [one for one in SECTIONS if not one.is_extra and (has_peer or not one.needs_peer)]
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    known = [section.name for section in SECTIONS]
    unknown = sorted(wanted - set(known))
    if unknown or not wanted:
        raise ValueError(f"--sections: {', '.join(unknown) or 'nothing named'}: there are {', '.join(known)}")
    chosen = [section for section in SECTIONS if section.name in wanted]
    if not has_peer and any(section.needs_peer for section in chosen):
        raise ValueError("--sections peer wants --peer FOLDER")
    return chosen

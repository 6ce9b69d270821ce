"""The targets of a run on an H200 with Llama-3-8B shapes, bfloat16 and random weights."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.gpu.figure import Figure

Verdict = Literal["met", "missed", "not measured"]


@dataclass(frozen=True, slots=True)
class Target:
    """A minimum or maximum of one figure.

    `share_of`: another figure and a share of it, which is the bound if it is lower.
    """

    text: str
    figure: str
    bound: float
    unit: str
    is_most: bool = False
    share_of: tuple[str, float] | None = None

    def limit(self, values: Mapping[str, float]) -> float:
        """Return the bound for the measured machine."""
        if self.share_of is None or self.share_of[0] not in values:
            return self.bound
        name, share = self.share_of
        return min(self.bound, share * values[name])

    def verdict(self, values: Mapping[str, float]) -> Verdict:
        """Return whether a run has met the target."""
        value = values.get(self.figure)
        if value is None:
            return "not measured"
        limit = self.limit(values)
        return "met" if (value <= limit if self.is_most else value >= limit) else "missed"


TARGETS = (
    Target("every kernel against float32: worst relative error", "kernels.worst_error", 2e-2, "", is_most=True),
    Target("1024 in, 512 out, saturating", "throughput.1024_512.total_tokens_per_s", 25_000, "tokens/s"),
    Target("512 in, 512 out", "throughput.512_512.total_tokens_per_s", 25_900, "tokens/s"),
    Target("128 in, 128 out", "throughput.128_128.total_tokens_per_s", 35_400, "tokens/s"),
    Target("220 in, 190 out", "throughput.220_190.total_tokens_per_s", 33_400, "tokens/s"),
    Target("1024 in, 512 out, over vLLM in the same run", "peer.1024_512.ratio", 1.1, "x"),
    Target("decode at batch 1, 1k context: share of the serial bound", "decode.batch_1.share", 0.85, ""),
    Target("decode at batch 32", "decode.batch_32.share", 0.82, ""),
    Target("decode at batch 256", "decode.batch_256.share", 0.80, ""),
    Target("int4 beside bfloat16: a decode step at batch 1", "quantized.step.int4.batch_1.ratio", 1.8, "x"),
    Target("int4 at batch 32", "quantized.step.int4.batch_32.ratio", 1.3, "x"),
    Target("fp8 beside bfloat16: a decode step at batch 1", "quantized.step.fp8.batch_1.ratio", 1.4, "x"),
    Target("fp8: the products of a layer with 4,096 rows", "quantized.gemm.4096.fp8", 1.3, "x"),
    Target("int8 on both sides: the products of a layer with 4,096 rows", "quantized.gemm.4096.w8a8", 1.2, "x"),
    Target("groups of blocks to the host", "copies.down_groups", 40, "GB/s", share_of=("copies.plain_down", 0.85)),
    Target("groups of blocks to the device", "copies.up_groups", 40, "GB/s", share_of=("copies.plain_up", 0.85)),
    Target(
        "to the host while the other way is busy",
        "copies.both_down_groups",
        35,
        "GB/s",
        share_of=("copies.plain_both_down", 0.85),
    ),
    Target(
        "to the device while the other way is busy",
        "copies.both_up_groups",
        35,
        "GB/s",
        share_of=("copies.plain_both_up", 0.85),
    ),
    Target("step with both copy directions busy, over idle", "swap.step_ratio", 1.03, "x", is_most=True),
    Target("preempted 4k tokens back and decoding, over the bare copy", "swap.return_ratio", 1.5, "x", is_most=True),
    Target("swapped bytes of the replay, of those without reuse", "switches.swapped_share", 0.55, "", is_most=True),
    Target("idle for swapping in the replay", "switches.idle_share", 0.05, "", is_most=True),
    Target("first token P99 of the replay, all off over full", "switches.ttft_gain", 1.4, "x"),
    Target("between tokens P99.9 of the replay, all off over full", "switches.tbt_gain", 1.4, "x"),
    Target("idle for swapping, conversations on the device", "replay.idle_share", 0.05, "", is_most=True),
    Target("mean copy between HBM and DDR there", "replay.copy_mib", 1.0, "MiB"),
    Target("time outside the model, 64 streams over HTTP", "streams.outside_share", 0.05, "", is_most=True),
)

OVERLAP_LEAST = 1.15
OVERLAP_BUILT = "overlap.built_best"
OVERLAP_GATES = ("overlap.halves_best", "overlap.prefill_best")


def values_of(figures: Iterable[Figure]) -> dict[str, float]:
    """Return the figures by name."""
    return {figure.name: figure.value for figure in figures}


def overlap_verdict(values: Mapping[str, float]) -> str:
    """Return one line: whether overlapping halves pay on this device, and how the answer is applied.

    The halves that are built decide. Those of one layer on disjoint processors tell whether to build that, too.
    """
    known = {gate: values[gate] for gate in (OVERLAP_BUILT, *OVERLAP_GATES) if gate in values}
    if not known:
        return "overlap: not measured"
    told = ", ".join(
        f"{gate.removeprefix('overlap.').removesuffix('_best')} {value:.2f}x" for gate, value in known.items()
    )
    if OVERLAP_BUILT not in known:
        word = "undecided, as the built halves were not measured"
    elif known[OVERLAP_BUILT] >= OVERLAP_LEAST:
        word = (
            "yes: run `tiercel calibrate MODEL --device cuda` once for each model; each later start of it overlaps the "
            "shapes that gain as much"
        )
    else:
        word = "no: nothing to do, without a table no step overlaps"
    apart = [gate for gate in OVERLAP_GATES if known.get(gate, 0.0) >= OVERLAP_LEAST]
    if apart and known.get(OVERLAP_BUILT, 0.0) < OVERLAP_LEAST:
        word += "; on disjoint processors it would pay: build that (decision 17)"
    return f"overlap: {told}; from {OVERLAP_LEAST}x on it pays: {word}"


BATCH_LEAST = 1.05


def batch_verdict(values: Mapping[str, float]) -> str:
    """Return one line: whether batches of copies are worth their code, compared with one call per block.

    They are if they are faster by 5 % or more in any direction and for any size of block that was measured.
    """
    ratios: dict[str, float] = {}
    for name, single in values.items():
        batch = values.get(name.removesuffix("_one_by_one"))
        if name.startswith("copies.") and name.endswith("_one_by_one") and batch is not None and single > 0:
            ratios[name.removeprefix("copies.").removesuffix("_kib_one_by_one")] = batch / single
    if not ratios:
        return "batches of copies: not measured"
    told = ", ".join(f"{name.replace('_', ' ')} KiB {ratio:.2f}x" for name, ratio in ratios.items())
    word = "keep cuMemcpyBatchAsync" if max(ratios.values()) >= BATCH_LEAST else "copy block by block"
    return f"batches of copies over single ones: {told}; from {BATCH_LEAST}x on they pay: {word}"

"""The promises of tiercel on a CPU, by class of processor, and whether figures keep them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.cpu.processor import ProcessorClass

Verdict = Literal["kept", "BROKEN", "unmeasured", "no promise"]
_JUDGED: tuple[ProcessorClass, ...] = ("avx2", "avx512_bf16", "amx")


@dataclass(frozen=True, slots=True)
class Promise:
    """A limit of one figure for each class of `avx2`, `avx512_bf16` and `amx`, and the aim beyond the limit."""

    figure: str
    text: str
    limits: tuple[float, float, float]
    aims: tuple[float, float, float]
    unit: str = "x"
    is_most: bool = False

    def limit(self, kind: ProcessorClass) -> float | None:
        """Return the limit for a class; None for a class without promises."""
        return self.limits[_JUDGED.index(kind)] if kind in _JUDGED else None

    def aim(self, kind: ProcessorClass) -> float | None:
        """Return the aim for a class; None for a class without promises."""
        return self.aims[_JUDGED.index(kind)] if kind in _JUDGED else None

    def verdict(self, kind: ProcessorClass, value: float | None) -> Verdict:
        """Return whether the figure of a machine of this class keeps the promise."""
        limit = self.limit(kind)
        if limit is None:
            return "no promise"
        if value is None:
            return "unmeasured"
        is_kept = value <= limit if self.is_most else value >= limit
        return "kept" if is_kept else "BROKEN"


PROMISES = (
    Promise("qwen05b.W1.out_tok_s.ratio", "W1 one stream, tokens/s", (1.15, 1.0, 1.0), (1.3, 1.3, 1.3)),
    Promise("qwen05b.W2.out_tok_s.ratio", "W2 16 streams, tokens/s", (1.6, 1.2, 1.2), (2.0, 1.4, 1.4)),
    Promise("llama1b.W2.out_tok_s.ratio", "W2 llama1b, tokens/s", (1.4, 1.05, 1.05), (1.6, 1.3, 1.3)),
    Promise("qwen05b.W3.out_tok_s.ratio", "W3 cold shared prefix, tokens/s", (1.2, 1.15, 1.15), (1.4, 1.4, 1.4)),
    Promise(
        "qwen05b.W4.gap_max_s.ratio",
        "W4 longest gap of the streams",
        (0.1, 0.1, 0.1),
        (0.05, 0.05, 0.05),
        is_most=True,
    ),
    Promise(
        "qwen05b.W4.long_ttft_s.ratio",
        "W4 first token of the long prompt, time",
        (0.8, 1.2, 1.2),
        (0.6, 1.0, 1.0),
        is_most=True,
    ),
    *(
        Promise(f"{model}-{kind}.{workload}.out_tok_s.ratio", f"{workload} {model} in {kind}, tokens/s", least, aim)
        for model in ("qwen05b", "llama1b")
        for kind in ("int8", "int4")
        for workload, least, aim in (("W1", (1.0,) * 3, (1.3,) * 3), ("W2", (1.5,) * 3, (2.0,) * 3))
    ),
    Promise("prefill.share", "prefill of 2,048 tokens, of the peak", (0.7, 0.7, 0.5), (0.8, 0.8, 0.8), "share"),
    Promise("attention.share", "decode attention, of the read bandwidth", (0.5, 0.5, 0.5), (0.7, 0.7, 0.7), "share"),
    Promise(
        "qwen05b.memory_gb",
        "resident memory less KV, qwen05b",
        (1.3, 1.3, 1.3),
        (1.1, 1.1, 1.1),
        "GB",
        is_most=True,
    ),
)
LOWER_IS_BETTER = frozenset({"gap_max_s", "long_ttft_s"})
JUDGED_BY_WORKLOAD = {
    "W1": ("out_tok_s",),
    "W2": ("out_tok_s",),
    "W3": ("out_tok_s",),
    "W3w": ("out_tok_s",),
    "W4": ("gap_max_s", "long_ttft_s"),
}
"""The figures of a workload whose ratio to the best peer is computed."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A promise and the figure that was measured."""

    promise: Promise
    kind: ProcessorClass
    value: float | None

    @property
    def verdict(self) -> Verdict:
        return self.promise.verdict(self.kind, self.value)


def best_peer(figure: str, value_by_peer: Mapping[str, float]) -> tuple[str, float] | None:
    """Return the peer with the best value of a figure such as `out_tok_s`, and the value; None without peers."""
    if not value_by_peer:
        return None
    choose = min if figure in LOWER_IS_BETTER else max
    name = choose(value_by_peer, key=lambda peer: value_by_peer[peer])
    return name, value_by_peer[name]


def judge(kind: ProcessorClass, values: Mapping[str, float]) -> list[Judgement]:
    """Return a judgement for each promise. `values`: the figures by name; missing ones are unmeasured."""
    return [Judgement(promise, kind, values.get(promise.figure)) for promise in PROMISES]


def exit_code(judgements: list[Judgement]) -> int:
    """Return 1 if a promise is broken, otherwise 0. A figure that was not measured breaks nothing."""
    return int(any(judgement.verdict == "BROKEN" for judgement in judgements))

"""Times of the engine's kernels on the CPU, beside those of torch, on the shapes of a model."""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tiercel.engine.attention.base import Attention, PagedReader
from tiercel.engine.attention.grouped import GroupedAttention
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.models.base import Model
from tiercel.engine.models.config import DecoderConfig, parse_decoder, read_config
from tiercel.engine.models.layers import Linear, can_pack
from tiercel.engine.models.precision import CpuProducts, Precision, choose_precision
from tiercel.engine.models.registry import load_model
from tiercel.engine.native.library import NativeLibrary, load_library
from tiercel.engine.native.linear import PACKED_DTYPES
from tiercel.settings.settings import EngineSettings

ROWS = (1, 4, 8, 16, 32, 64, 256, 1024, 2048)
CONTEXTS = (512, 1024, 2048, 4096)
PROMPT = 2048
SEQUENCES = 16  # of a decode

_BLOCK = 16  # tokens
_STEP = 256  # tokens of a step of the engine
_COLD_BYTES = 96 << 20  # of weights or KV that are used in turns: more than the last cache holds
_ARENA_BYTES = 512 << 20
_LEAST_S, _LEAST_RUNS = 0.2, 3
_MOST_S = 10.0  # of runs of one kernel: on a slow machine fewer of them have to do
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Work:
    """What a kernel has to do at least: read bytes and compute operations, a product with its addition counting two."""

    bytes: float
    operations: float


@dataclass(frozen=True, slots=True)
class TimedWork:
    """One kernel's work, and the seconds that implementations needed for it; `ours` is that of the engine."""

    name: str
    work: Work
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Shapes:
    """The linear layers of a model: outputs, inputs and how often they occur."""

    layers: dict[str, tuple[int, int, int]]

    @classmethod
    def of(cls, config: DecoderConfig) -> "Shapes":
        """Return the products of one forward, as the engine joins them."""
        hidden, inner, heads = config.hidden_size, config.intermediate_size, config.heads * config.head_dim
        qkv = heads + 2 * config.kv_heads * config.head_dim
        return cls(
            {
                "qkv": (qkv, hidden, config.layers),
                "output": (hidden, heads, config.layers),
                "gate_up": (2 * inner, hidden, config.layers),
                "down": (hidden, inner, config.layers),
                "head": (config.vocab_size, hidden, 1),
            }
        )

    def weights(self, *, with_head: bool = True) -> int:
        """Return the number of weights that a forward reads."""
        shapes = (shape for name, shape in self.layers.items() if with_head or name != "head")
        return sum(outputs * inputs * count for outputs, inputs, count in shapes)


class KernelTrials:
    """The trials of one model folder. Everything runs on the caller's thread and torch's team of threads."""

    def __init__(self, folder: Path, library: NativeLibrary | None) -> None:
        self.name = folder.name
        self._folder = folder
        self._library = library
        fields = read_config(folder)
        self._config = parse_decoder(fields)
        self.precision: Precision = choose_precision("auto", fields, CpuProducts.of(library))
        self._shapes = Shapes.of(self._config)

    @classmethod
    def open(cls, folder: Path) -> "KernelTrials":
        """Return the trials with the kernels that the engine would use."""
        return cls(folder, load_library())

    @property
    def facts(self) -> dict[str, str]:
        """Return what computes."""
        found = {"precision": str(self.precision), "attention": type(self._attention()).__name__}
        if self._library is None:
            return found | {"native": "none"}
        return found | {
            "native": self._library.cpu_class.name.lower(),
            "switched_off": ", ".join(self._library.switched_off) or "none",
        }

    # ---- matrix products

    @torch.inference_mode()
    def linear(self, rows: tuple[int, ...]) -> Iterator[TimedWork]:
        """Yield the time of all products of one forward for each number of rows, by layer and together.

        Weights are used in turns, so that they come from memory. More than 64 rows are a prompt, whose head is
        computed for one row.
        """
        for count in rows:
            parts: list[TimedWork] = []
            for layer, (outputs, inputs, times) in self._shapes.layers.items():
                mine = 1 if layer == "head" and count > 64 else count
                seconds = self._time_linear(outputs, inputs, mine)
                weights = float(outputs * inputs * times)
                work = Work(weights * self.precision.weights.itemsize, 2.0 * mine * weights)
                timed = {name: one * times for name, one in seconds.items()}
                parts.append(TimedWork(f"linear.{self.name}.M{count}.{layer}", work, timed))
            names = [name for name in parts[0].seconds if all(name in part.seconds for part in parts)]
            whole = Work(sum(part.work.bytes for part in parts), sum(part.work.operations for part in parts))
            seconds = {name: sum(part.seconds[name] for part in parts) for name in names}
            yield TimedWork(f"linear.{self.name}.M{count}", whole, seconds)
            yield from parts

    def _time_linear(self, outputs: int, inputs: int, rows: int) -> dict[str, float]:
        copies = (
            max(1, min(24, -(-_COLD_BYTES // (self.precision.weights.itemsize * outputs * inputs))))
            if rows <= 64
            else 1
        )
        weights = [torch.randn(outputs, inputs).to(self.precision.weights) for _ in range(copies)]
        x = torch.randn(rows, inputs).to(self.precision.activations)
        layers = [Linear(inputs, (outputs,), False, self.precision, _CPU) for _ in weights]
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight[:] = weight
            self._pack(layer)
        found = {"ours": _best_s([lambda layer=layer: layer.forward(x) for layer in layers])}
        del layers
        wide = [weight.to(x.dtype) for weight in weights]
        found["torch"] = _best_s([lambda weight=weight: F.linear(x, weight) for weight in wide])
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, _BLOCK) for weight in wide]
        found["onednn"] = _best_s(
            [lambda w=w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "") for w in packed]
        )
        return found

    def _pack(self, layer: Linear) -> None:
        """Pack a weight as `Decoder.pack` does."""
        if self._library is not None and self.precision.weights in PACKED_DTYPES:
            layer.pack(self._library)
        elif can_pack(self.precision, _CPU):
            layer.pack()

    # ---- attention

    @torch.inference_mode()
    def attention(self, contexts: tuple[int, ...]) -> Iterator[TimedWork]:
        """Yield the time of one layer's decode attention of 16 sequences for each context."""
        config, kv_type = self._config, self.precision.kv
        token_bytes = config.kv_heads * 2 * config.head_dim * kv_type.itemsize
        params = AttentionParams(scale=config.head_dim**-0.5, window=None)
        for context in contexts:
            blocks = SEQUENCES * context // _BLOCK
            layer_bytes = blocks * _BLOCK * token_bytes
            layers = max(1, min(config.layers, _ARENA_BYTES // layer_bytes, -(-2 * _COLD_BYTES // layer_bytes)))
            arena = torch.empty(blocks + 1, layers, _BLOCK, config.kv_heads, 2 * config.head_dim, dtype=kv_type)
            arena[:] = torch.randn(arena.shape[1:]).to(kv_type)
            tables = (torch.randperm(blocks) + 1).view(SEQUENCES, -1)
            state = ForwardState.of_slices(tables, [context - 1] * SEQUENCES, [context] * SEQUENCES, _BLOCK)
            query, key, value = (
                torch.randn(SEQUENCES, heads, config.head_dim).to(self.precision.activations)
                for heads in (config.heads, config.kv_heads, config.kv_heads)
            )

            def run(attention: Attention, layer: int) -> Callable[[], Tensor]:
                kv = arena[:, layer]  # noqa: B023 - used before the next turn of the loop
                if isinstance(attention, PagedReader):
                    return lambda: attention.read(query, kv, state, params)  # noqa: B023
                return lambda: attention.attend(query, key, value, kv, state, params)  # noqa: B023

            seconds = {
                name: _best_s([run(attention, layer) for layer in range(layers)])
                for name, attention in (("ours", self._attention()), ("gather + sdpa", GroupedAttention()))
            }
            products = 4.0 * SEQUENCES * context * config.heads * config.head_dim
            yield TimedWork(f"attention.{self.name}.{context}", Work(layer_bytes, products), seconds)

    def _attention(self) -> Attention:
        return open_attention("auto", _CPU)

    # ---- prefill

    @torch.inference_mode()
    def prefill(self) -> Iterator[TimedWork]:
        """Yield the time of a prompt of 2,048 tokens through the model, with everything and its last token's logits.

        `prefill` is one forward, `chunks` are steps of 256 tokens as the engine runs them by default.
        """
        model = self._load()
        blocks = PROMPT // _BLOCK
        kv = torch.zeros(blocks + 1, model.layers, _BLOCK, model.kv_heads, 2 * model.head_dim, dtype=self.precision.kv)
        tables = (torch.randperm(blocks) + 1).view(1, -1)
        tokens = torch.randint(model.vocab_size, (PROMPT,))
        config = self._config
        attention = 2.0 * PROMPT * (PROMPT + 1) * config.heads * config.head_dim * config.layers
        products = 2.0 * PROMPT * self._shapes.weights(with_head=False) + 2.0 * config.vocab_size * config.hidden_size
        work = Work(float(self._shapes.weights() * self.precision.weights.itemsize), products + attention)
        for name, size in (("prefill", PROMPT), ("chunks", _STEP)):

            def run(size: int = size) -> Tensor:
                hidden = torch.empty(0)
                for start in range(0, PROMPT, size):
                    state = ForwardState.of_slices(tables, [start], [start + size], _BLOCK)
                    hidden = model.forward(tokens[start : start + size], kv, state)
                return model.logits(hidden[-1:])

            yield TimedWork(f"{name}.{self.name}", work, {"ours": _best_s([run])})

    def _load(self) -> Model:
        settings = EngineSettings(model=str(self._folder), device="cpu")
        return load_model(settings, _CPU, self._attention(), library=self._library)


def _best_s(runs: list[Callable[[], Tensor]]) -> float:
    """Return the seconds of one run: the best average over all of them in turns, because other programs only add time.

    The first turn, which opens buffers, does not count.
    """
    best = spent = 0.0
    for turn in itertools.count(-1):
        start_s = time.perf_counter()
        for run in runs:
            run()
        lasted = time.perf_counter() - start_s
        if turn >= 0:
            best = lasted if not turn else min(best, lasted)
            spent += lasted
            if (turn + 1 >= _LEAST_RUNS and spent >= _LEAST_S) or spent >= _MOST_S:
                break
    return best / len(runs)

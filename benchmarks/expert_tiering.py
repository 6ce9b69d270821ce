"""How fast a mixture of experts is when half of its experts are in memory and the others on the SSD.

    python benchmarks/expert_tiering.py [--folder DIR] [--quantization int4] [--hidden 512 --inner 192] [--control]

One stream is decoded twice, with all experts in memory and with memory for half of them, in turns. The model has the
proportions of Qwen3-30B-A3B: 128 experts, 8 for each token, inner size 3/8 of the hidden size, twice as wide attention;
its weights are random. The experts of each token come from a trace in which an expert's chance is one over its rank
(Zipf 1.0), with other ranks in each layer and no memory from token to token: `benchmarks/traces/expert_routings.txt`,
written by `--write-trace`. What a layer predicts for the next one is right for half of the experts; the others are
those of another token.

Fails if the tiered model has less than 60 % of the speed, if fewer than 80 % of the experts were in memory when they
were needed, or if a logit differs. `--control` draws experts that are all equally likely, and must fail.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tiercel.system.openmp import adopt_engine_environment

adopt_engine_environment()

import numpy as np  # noqa: E402 - OpenMP reads the environment when torch is loaded
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.checks import missed_checks  # noqa: E402
from tiercel.engine.attention.registry import open_attention  # noqa: E402
from tiercel.engine.forward.state import ForwardState  # noqa: E402
from tiercel.engine.models.decoder import Decoder  # noqa: E402
from tiercel.engine.models.registry import load_model  # noqa: E402
from tiercel.engine.native.library import load_library  # noqa: E402
from tiercel.settings.settings import EngineSettings  # noqa: E402

TRACE = Path(__file__).parent / "traces" / "expert_routings.txt"
LAYERS, EXPERTS, PER_TOKEN, TOKENS = 6, 128, 8, 400
WARM = 100  # tokens before those that count
BLOCK = 16
LEAST_SPEED, LEAST_HITS = 0.60, 0.80
CPU = torch.device("cpu")


def draw_trace(seed: int, exponent: float) -> np.ndarray:
    """Return the experts of each token in each layer. Shape: [TOKENS, LAYERS, PER_TOKEN] uint8."""
    rng = np.random.default_rng(seed)
    ranks = np.stack([rng.permutation(EXPERTS) for _ in range(LAYERS)])
    chances = -exponent * np.log1p(ranks)
    return np.argsort(-(chances + rng.gumbel(size=(TOKENS, LAYERS, EXPERTS))))[..., :PER_TOKEN].astype(np.uint8)


def write_trace() -> None:
    lines = ["".join(f"{expert:02x}" for expert in token.flatten()) for token in draw_trace(1, 1.0)]
    TRACE.write_text("\n".join(lines) + "\n", encoding="ascii")


def read_trace() -> np.ndarray:
    """Return the trace of the repository. Shape: [TOKENS, LAYERS, PER_TOKEN] uint8."""
    rows = [bytes.fromhex(line) for line in TRACE.read_text(encoding="ascii").splitlines()]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(TOKENS, LAYERS, PER_TOKEN)


class Place:
    """The token of the trace that is computed now."""

    token = 0


class TraceRouter:
    """Chooses the experts of the trace. If a layer before asks for a prediction, that is the first call of a token."""

    def __init__(self, chosen: np.ndarray, guessed: np.ndarray, place: Place, *, is_predicted: bool) -> None:
        """`chosen`, `guessed`: of this layer, [TOKENS, PER_TOKEN]."""
        self._logits = [_logits_of(rows) for rows in ((guessed, chosen) if is_predicted else (chosen,))]
        self._place = place
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return logits. Shapes: x [1, hidden] -> [1, experts]."""
        rows = self._logits[self._calls % len(self._logits)]
        self._calls += 1
        return rows[self._place.token][None].to(x)


def _logits_of(chosen: np.ndarray) -> Tensor:
    logits = torch.full((TOKENS, EXPERTS), -30.0)
    logits.scatter_(
        1, torch.from_numpy(chosen.astype(np.int64)), 3.0 - torch.arange(PER_TOKEN) / 4.0 + torch.zeros(TOKENS, 1)
    )
    return logits


def guess(trace: np.ndarray, seed: int) -> np.ndarray:
    """Return predictions that are right for half of the experts of each token, the others those of another token."""
    order = np.random.default_rng(seed).permutation(TOKENS)
    return np.concatenate((trace[..., : PER_TOKEN // 2], trace[order][..., PER_TOKEN // 2 :]), axis=-1)


@dataclass
class Run:
    """One model, and the tokens that it has decoded."""

    model: Decoder
    place: Place

    def decode(self) -> tuple[float, Tensor]:
        """Decode the whole trace. Return the seconds of the tokens that count, and the logits of all."""
        model = self.model
        blocks = -(-TOKENS // BLOCK)
        shape = (blocks + 1, model.layers, BLOCK, model.kv_heads, 2 * model.head_dim)
        kv, table = torch.zeros(shape, dtype=model.precision.kv), torch.arange(1, blocks + 1)[None]
        logits: list[Tensor] = []
        start_s = 0.0
        for token in range(TOKENS):
            if token == WARM:
                start_s = time.perf_counter()
            self.place.token = token
            with torch.inference_mode():
                state = ForwardState.of_slices(table, [token], [token + 1], BLOCK)
                hidden = model.forward(torch.tensor([3 + token % 200]), kv, state)
                logits.append(model.logits(hidden))
        return time.perf_counter() - start_s, torch.cat(logits)


def open_run(folder: Path, quantization: str, memory: int | None, trace: np.ndarray) -> Run:
    """Load the model with random weights and routers that follow the trace. `memory`: see `--expert-memory`."""
    settings = EngineSettings(
        model=str(folder), load_format="dummy", quantization=quantization, expert_memory_bytes=memory,
        cache_folder=str(folder / "experts"),
    )  # fmt: skip
    model = load_model(settings, CPU, open_attention("native", CPU), library=load_library())
    assert isinstance(model, Decoder)
    place, guessed = Place(), guess(trace, 2)
    for index, mixture in enumerate(model.mixtures):
        is_predicted = memory is not None and index > 0
        mixture.router = TraceRouter(trace[:, index], guessed[:, index], place, is_predicted=is_predicted)
    return Run(model, place)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the SSD that is measured; default: a temporary folder")
    parser.add_argument("--quantization", choices=("auto", "int8", "int4"), default="int4")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--inner", type=int, default=192, help="size of an expert")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--control", action="store_true", help="all experts are equally likely; must fail")
    parser.add_argument("--write-trace", action="store_true", help="write the trace and end")
    asked = parser.parse_args()
    if asked.write_trace:
        write_trace()
        return 0
    torch.set_num_threads(asked.threads)
    trace = draw_trace(3, 0.0) if asked.control else read_trace()
    with tempfile.TemporaryDirectory(dir=asked.folder) as made:
        folder = Path(made)
        (folder / "config.json").write_text(json.dumps(_config(asked.hidden, asked.inner)), encoding="utf-8")
        return _measure(folder, asked.quantization, asked.rounds, trace)


def _config(hidden: int, inner: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 1024,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2 * hidden // 64,
        "num_key_value_heads": hidden // 128,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "num_experts": EXPERTS,
        "num_experts_per_tok": PER_TOKEN,
        "moe_intermediate_size": inner,
        "norm_topk_prob": True,
        "dtype": "bfloat16",
    }


def _measure(folder: Path, quantization: str, rounds: int, trace: np.ndarray) -> int:
    probe = open_run(folder, quantization, 1 << 40, trace)
    assert probe.model.tier is not None
    whole_bytes = probe.model.tier.gauges().memory_bytes
    probe.model.tier.close()
    whole = open_run(folder, quantization, None, trace)
    tiered = open_run(folder, quantization, whole_bytes // 2, trace)
    tier = tiered.model.tier
    assert tier is not None
    speeds: list[tuple[float, float]] = []
    is_exact = True
    first = tier.gauges()
    for _ in range(rounds):
        seconds, expected = whole.decode()
        tiered_s, found = tiered.decode()
        is_exact = is_exact and torch.equal(found, expected)
        speeds.append(((TOKENS - WARM) / seconds, (TOKENS - WARM) / tiered_s))
    last = tier.gauges()
    hits, misses = last.hits - first.hits, last.misses - first.misses
    in_memory, partly = (median(pair[side] for pair in speeds) for side in (0, 1))
    print(
        f"experts: {last.experts} of {whole_bytes / last.experts / 1e6:.2f} MB, {last.slots} in memory, {quantization}"
    )
    print(f"all in memory {in_memory:7.1f} tokens/s   half in memory {partly:7.1f} tokens/s   {partly / in_memory:.2f}")
    print(f"in memory when needed {hits / (hits + misses):.3f}   read {last.fetched_bytes / 1e6:,.0f} MB")
    print(
        f"stalls {last.stalls:,} of {last.stall_s * 1000 / max(1, last.stalls):.2f} ms   ahead {last.fetched_ahead:,}"
    )
    tier.close()
    return (
        1
        if missed_checks(
            [
                (f"at least {LEAST_SPEED:.0%} of the speed", partly >= LEAST_SPEED * in_memory),
                (f"at least {LEAST_HITS:.0%} in memory when needed", hits >= LEAST_HITS * (hits + misses)),
                ("the same logits, bit for bit", is_exact),
            ]
        )
        else 0
    )


if __name__ == "__main__":
    sys.exit(main())

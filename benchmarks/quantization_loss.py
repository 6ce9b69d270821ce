"""How much worse a model predicts text it has not seen when its weights or its KV cache have fewer bits.

    python benchmarks/quantization_loss.py FOLDER [--steps 1200] [--texts 120] [--control]

Trains a Llama of 10 million parameters on generated text (`tools/embedded`), unless FOLDER has it already, and lets the
engine read texts that the training has not seen: with its bfloat16 weights, quantised at load (`--quantization int8`
and `int4`), and with 8 bits in the KV cache. Activations are float32, so that the differences come from the
quantisation. For comparison the same weights are rounded to Q4_0 as llama.cpp does it, and read without quantisation.

Fails if the perplexity grows by more than 0.3 % with int8 weights or an int8 KV cache, or with int4 by more than 0.5 %
over that of Q4_0. `--control` rounds the weights to 3 bits before each measurement but the first, and must fail.
"""

import argparse
import json
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tiercel.system.openmp import adopt_engine_environment

adopt_engine_environment()

import torch  # noqa: E402 - OpenMP reads the environment when torch is loaded
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402

from benchmarks.checks import missed_checks  # noqa: E402
from tiercel.engine.offline import OfflineEngine, OfflineRequest  # noqa: E402
from tiercel.settings.settings import EngineSettings  # noqa: E402
from tiercel.values.clock import MonotonicClock  # noqa: E402
from tiercel.values.request import SamplingParams, pack_tokens  # noqa: E402
from tools.embedded.batches import Encoder  # noqa: E402
from tools.embedded.grammar import plain_text, prose_chat, recall_text  # noqa: E402
from tools.embedded.network import Network, Shape, hf_weights  # noqa: E402
from tools.embedded.tokenizer import build_tokenizer, save_tokenizer  # noqa: E402

MOST_GROWTH = 1.003
MOST_OVER_Q4_0 = 1.005
LENGTH = 256  # tokens of a row of training and of a text
ROWS = 24  # of a step
SHAPE = Shape(hidden=384, layers=6, heads=6, kv_heads=2, inner=1024, positions=1024)
CONTROL_BITS = 3


class TextSource:
    """Rows of token ids of generated text, one text after the other."""

    def __init__(self) -> None:
        self.tokenizer = build_tokenizer()
        self.encoder = Encoder(self.tokenizer)

    def rows(self, name: str, count: int) -> Tensor:
        """Return rows that depend on their name alone. Shapes: [count, LENGTH + 1]."""
        rng, ids = Random(name), list[int]()
        while len(ids) < count * (LENGTH + 1):
            chats = [rng.choice((prose_chat, prose_chat, plain_text, recall_text))(rng, LENGTH) for _ in range(count)]
            for row, _ in self.encoder.encode(chats):
                ids += row
        return torch.tensor(ids[: count * (LENGTH + 1)]).view(count, LENGTH + 1)


def train(folder: Path, steps: int) -> None:
    """Train a model and write it as a Hugging Face folder with bfloat16 weights."""
    torch.manual_seed(0)
    source = TextSource()
    network = Network(SHAPE)
    fast = torch.compile(network, dynamic=False)
    matrices = [weight for weight in network.blocks.parameters() if weight.ndim == 2]
    chosen = {id(weight) for weight in matrices}
    optimisers: tuple[torch.optim.Optimizer, ...] = (
        torch.optim.Muon(matrices, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([one for one in network.parameters() if id(one) not in chosen], betas=(0.9, 0.98)),
    )
    for step in range(steps):
        rows = source.rows(f"train {step}", ROWS)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = network.logits(fast(rows[:, :-1]).view(-1, SHAPE.hidden)).float()
        loss = functional.cross_entropy(logits, rows[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = 2e-3 * min(1.0, (step + 1) / 50) * min(1.0, 2 * (steps - step) / steps)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        if step % 50 == 0:
            print(f"step {step} of {steps}: perplexity {math.exp(loss.item()):.4f}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(source.tokenizer, folder)
    config = SHAPE.hf_config(source.encoder.end, source.encoder.pad) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(hf_weights(network, torch.bfloat16), folder / "model.safetensors", metadata={"format": "pt"})


def is_matrix(name: str) -> bool:
    """Return whether a tensor is a weight of a layer, which quantising changes."""
    return name.endswith("_proj.weight")


def rounded_q4_0(weight: Tensor) -> Tensor:
    """Return a weight as llama.cpp computes with it after quantising it to Q4_0.

    Of 32 numbers, the one with the largest magnitude becomes -8, and the scale has 16 bits.
    Source: `quantize_row_q4_0_ref` of ggml. Shapes: [outputs, inputs]; inputs a multiple of 32.
    """
    blocks = weight.float().view(-1, 32)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scales = largest / -8
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    numbers = (blocks * inverse + 8.5).floor().clamp(0, 15) - 8
    return (numbers * scales.half().float()).view_as(weight)


def rounded_coarsely(weight: Tensor) -> Tensor:
    """Return a weight rounded to `CONTROL_BITS` bits, with one scale per output."""
    most = 2 ** (CONTROL_BITS - 1) - 1
    scales = weight.float().abs().amax(1, keepdim=True) / most
    return (weight.float() / scales).round() * scales


def change_weights(source: Path, target: Path, change: "Change") -> Path:
    """Write a folder with changed matrices in float32. Return it."""
    target.mkdir()
    for path in source.iterdir():
        if path.suffix == ".json":
            (target / path.name).write_bytes(path.read_bytes())
    weights = load_file(source / "model.safetensors")
    changed = {name: change.of(one) if is_matrix(name) else one.float() for name, one in weights.items()}
    save_file(changed, target / "model.safetensors", metadata={"format": "pt"})
    return target


@dataclass(frozen=True, slots=True)
class Change:
    """A change of weights: to those of Q4_0, coarser ones, or both."""

    is_q4_0: bool = False
    is_coarse: bool = False

    def of(self, weight: Tensor) -> Tensor:
        """Return the changed weight in float32."""
        coarse = rounded_coarsely(weight) if self.is_coarse else weight.float()
        return rounded_q4_0(coarse) if self.is_q4_0 else coarse


@dataclass(frozen=True, slots=True)
class Variant:
    """A model as the engine is to serve it."""

    name: str
    settings: dict[str, str]
    change: Change = Change()


VARIANTS = (
    Variant("bfloat16 weights", {}),
    Variant("int8 weights", {"quantization": "int8"}),
    Variant("int4 weights", {"quantization": "int4"}),
    Variant("Q4_0 weights of llama.cpp", {}, Change(is_q4_0=True)),
    Variant("int8 KV cache", {"kv_cache_dtype": "int8"}),
    Variant("fp8 KV cache", {"kv_cache_dtype": "fp8"}),
)


def perplexity(folder: Path, texts: Tensor, settings: dict[str, str]) -> float:
    """Return how many tokens the model hesitates between, on average. Shapes: texts [N, LENGTH + 1]."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, ignore_eos=True)
    asked = [OfflineRequest(pack_tokens(row), params) for row in texts.tolist()]
    more = EngineSettings(
        model=str(folder), dtype="float32", max_model_len=LENGTH + 16, calibration_s=0.0, enable_prefix_caching=False,
        num_gpu_blocks_override=600, **settings,
    )  # fmt: skip
    with OfflineEngine.open(more, MonotonicClock()) as engine:
        run = engine.run(asked)
    logprobs = [value for answer in run.answers for value in answer.prompt_logprobs]
    if len(logprobs) != texts[:, 1:].numel():
        raise SystemExit(f"{len(logprobs)} log-probabilities of {texts[:, 1:].numel()} tokens")
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def main() -> int:
    """Train if needed, measure, print and check. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the trained model; made if it is not there")
    parser.add_argument("--steps", type=int, default=1200, help="of training")
    parser.add_argument("--texts", type=int, default=120, help="texts of 256 tokens that the models read")
    parser.add_argument("--control", action="store_true", help="spoil the weights of all but the first measurement")
    arguments = parser.parse_args()
    if not (arguments.folder / "model.safetensors").is_file():
        train(arguments.folder, arguments.steps)
    texts = TextSource().rows("held out", arguments.texts)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for number, variant in enumerate(VARIANTS):
            change = Change(variant.change.is_q4_0, arguments.control and number > 0)
            folder = arguments.folder
            if change != Change():
                folder = change_weights(folder, Path(temporary) / str(number), change)
            found[variant.name] = perplexity(folder, texts, variant.settings)
            growth = 100 * (found[variant.name] / found[VARIANTS[0].name] - 1)
            print(f"{variant.name:28} perplexity {found[variant.name]:.5f}  {growth:+.3f} %", flush=True)
    plain, int8, int4, q4_0, kv_int8, _ = found.values()
    if arguments.control:
        q4_0 = plain  # the control spoils it, too
    missed = missed_checks(
        (
            (f"int8 weights: {int8 / plain:.5f} times, at most {MOST_GROWTH}", int8 <= MOST_GROWTH * plain),
            (f"int8 KV cache: {kv_int8 / plain:.5f} times, at most {MOST_GROWTH}", kv_int8 <= MOST_GROWTH * plain),
            (f"int4 over Q4_0: {int4 / q4_0:.5f} times, at most {MOST_OVER_Q4_0}", int4 <= MOST_OVER_Q4_0 * q4_0),
        )
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

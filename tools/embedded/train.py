"""Trains the embedded model: `python -m tools.embedded.train --out DIR --seed 0`.

The grammar writes the text as it is needed; each step's text depends on the seed and the
step alone, so training can stop and go on. The curriculum starts with short dense contexts,
in which the circuits for recall form quickly, and then grows and varies them.
"""

# ruff: noqa: S311 - nothing here is secret

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, distributed
from torch._dynamo import config as dynamo_config
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

from tiercel.embedded import MODEL_DIR
from tools.embedded.batches import Batch, Encoder, Weights
from tools.embedded.grammar import FULL_STYLE, RecallStyle
from tools.embedded.muon import Muon
from tools.embedded.network import Network, Shape, hf_weights
from tools.embedded.sketch import sketch_lookup
from tools.embedded.tokenizer import build_tokenizer, save_tokenizer

PROSE_LENGTH = 256


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of the curriculum."""

    name: str
    lengths: tuple[int, ...]
    """Context lengths; each step draws one, so repeating one makes it likelier."""
    steps: int
    """The most steps that the stage takes."""
    until: float = 1.1
    """The stage ends early once the running accuracy of first digits reaches this."""
    rate: float = 2e-3
    last_rate: float | None = None
    """The learning rate falls to this in a straight line; without it, it stays."""
    style: RecallStyle = field(default_factory=RecallStyle)
    digit: float = 0.5
    """How much the loss counts the later digits of a code; the first digit counts 1."""
    answer: float = 0.5
    """How much the loss counts other tokens of an answer, among them those of names."""
    prose: int = 0
    """Tokens of prose beside each step's recall text."""
    sums: float = 0.0
    """The share of the prose that is nothing but sums."""
    tokens: int = 4096
    """Tokens of recall text a step."""


UNSEEN = replace(FULL_STYLE, made_up=0.8, casual=0.2, paraphrase=0.8)

LONG = (512, 1024, 1024, 1024, 2048, 4096)
MIXED = (256, 256, 512, 1024, 1024, 1024, 2048, 4096)

STAGES: tuple[Stage, ...] = (
    Stage("spark", (256,), 50, rate=1e-3, style=UNSEEN, tokens=6144, prose=2048),
    Stage("long", (256, 512, 1024), 150, rate=2e-3, style=UNSEEN, prose=4096),
    Stage("settle", MIXED, 900, rate=2e-3, last_rate=2e-5, style=UNSEEN, digit=1.0, prose=4096, sums=0.4),
    Stage(
        "polish",
        LONG,
        400,
        rate=8e-4,
        last_rate=1e-5,
        style=replace(UNSEEN, letters=0.8),
        digit=1.0,
        prose=2048,
        sums=0.4,
        tokens=6144,
    ),
    Stage(
        "sharpen",
        LONG,
        700,
        rate=1.2e-3,
        last_rate=1e-5,
        style=replace(UNSEEN, letters=0.8, alike=0.3),
        digit=1.0,
        prose=2048,
        sums=0.4,
        tokens=6144,
    ),
    Stage(
        "spell",
        LONG,
        450,
        rate=1e-3,
        last_rate=1e-5,
        style=replace(UNSEEN, made_up=0.9, letters=0.9, alike=0.3, narrow=0.3),
        digit=1.0,
        answer=1.0,
        prose=3072,
        sums=0.25,
        tokens=6144,
    ),
)


@dataclass(slots=True)
class Progress:
    """Where training stands; part of a checkpoint."""

    step: int = 0
    stage: int = 0
    stage_step: int = 0
    seconds: float = 0.0
    accuracy: float = 0.0
    """The running share of first digits in answers of recall chats that are right."""
    loss: float = 0.0
    prose_loss: float = 0.0


class Trainer:
    """The network, its optimisers and the stream of batches."""

    def __init__(
        self,
        out: Path,
        seed: int,
        device: str,
        rank: int,
        ranks: int,
        compiled: bool = False,
        renew: bool = False,
    ) -> None:
        torch.manual_seed(seed)
        self.out, self.seed, self.device = out, seed, torch.device(device)
        self.rank, self.ranks = rank, ranks
        self.tokenizer = build_tokenizer() if renew else Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
        self.encoder = Encoder(self.tokenizer)
        network = Network(Shape(vocab=self.tokenizer.get_vocab_size()))
        sketch_lookup(network, self.tokenizer)
        self.network = network.to(self.device)
        self.fast: Callable[[Tensor], Tensor] = self.network
        if compiled:
            # Each shape of a batch is compiled once; the usual limit is below their number.
            dynamo_config.recompile_limit = 64
            self.fast = torch.compile(self.network, dynamic=False)
        matrices = [weight for weight in self.network.blocks.parameters() if weight.ndim == 2]
        chosen = {id(weight) for weight in matrices}
        others = [weight for weight in self.network.parameters() if id(weight) not in chosen]
        self.optimisers: tuple[torch.optim.Optimizer, ...] = (
            Muon(matrices),
            torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
        )
        self.progress = Progress()
        self.log = (out / "log.txt").open("a", encoding="utf-8")

    def say(self, text: str) -> None:
        """Write a line to the log and to the terminal."""
        if self.rank:
            return
        print(text, flush=True)
        self.log.write(text + "\n")
        self.log.flush()

    def rate(self, stage: Stage) -> float:
        """The learning rate of this step."""
        warm = min(1.0, (self.progress.step + 1) / 20)
        if stage.last_rate is None:
            return warm * stage.rate
        done = self.progress.stage_step / stage.steps
        return warm * (stage.rate + (stage.last_rate - stage.rate) * done)

    def batches(self, stage: Stage, step: int) -> list[Batch]:
        """The batches of one step: recall text, and prose if the stage has any."""
        rng = Random(f"{self.seed} {stage.name} {step}")
        length = rng.choice(stage.lengths)
        rng = Random(f"{self.seed} {stage.name} {step} {self.rank}")
        tokens, weights = stage.tokens // self.ranks, Weights(answer=stage.answer, digit=stage.digit)
        batches = [self.encoder.recall_batch(rng, tokens, length, stage.style, weights)]
        if stage.prose:
            batches.append(self.encoder.prose_batch(rng, stage.prose // self.ranks, PROSE_LENGTH, stage.sums))
        return batches

    def stream(self, stage: Stage) -> Iterator[list[Batch]]:
        """The batches from here to the end of the stage, one step made ahead."""
        first, last = self.progress.stage_step, stage.steps
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(self.batches, stage, first)
            for step in range(first, last):
                ready = coming.result()
                coming = pool.submit(self.batches, stage, step + 1)
                yield ready

    def _precision(self) -> AbstractContextManager[object]:
        if self.device.type == "cpu" and not torch.cpu._is_amx_tile_supported():
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _backward(self, batch: Batch) -> tuple[float, float]:
        """Add the gradients of one batch; its loss and its accuracy on first digits."""
        batch = batch.to(self.device)
        with self._precision():
            hidden = self.fast(batch.ids).view(-1, self.network.shape.hidden)
            logits = self.network.logits(hidden[batch.places]).float()
        losses = functional.cross_entropy(logits, batch.targets, reduction="none")
        loss = (losses * batch.weights).sum() / batch.weights.sum()
        loss.backward()
        right = (logits.argmax(-1) == batch.targets)[batch.leads].float()
        return loss.item(), right.mean().item()

    def _share(self, results: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """Average gradients and results over the processes."""
        if self.ranks == 1:
            return results
        gradients = [weight.grad for weight in self.network.parameters() if weight.grad is not None]
        numbers = torch.tensor(results, device=self.device)
        flat = torch.cat([part.reshape(-1) for part in (numbers, *gradients)])
        distributed.all_reduce(flat)
        flat /= self.ranks
        parts = flat.split([part.numel() for part in (numbers, *gradients)])
        for gradient, part in zip(gradients, parts[1:], strict=True):
            gradient.copy_(part.view_as(gradient))
        return [(loss, right) for loss, right in parts[0].view(-1, 2).tolist()]

    def take_step(self, stage: Stage, batches: list[Batch]) -> None:
        """One step of the optimisers."""
        now, keep = self.progress, 0.95 if self.progress.stage_step > 20 else 0.8
        results = [self._backward(batch) for batch in batches]
        for index, (loss, right) in enumerate(self._share(results)):
            if index:
                now.prose_loss += (1 - keep) * (loss - now.prose_loss)
            else:
                now.loss += (1 - keep) * (loss - now.loss)
                now.accuracy += (1 - keep) * (right - now.accuracy)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = self.rate(stage)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        now.step += 1
        now.stage_step += 1

    def run_stage(self, stage: Stage) -> None:
        """Train one stage to its end."""
        now, since, tokens = self.progress, time.monotonic(), 0
        for batches in self.stream(stage):
            self.take_step(stage, batches)
            tokens += self.ranks * sum(batch.ids.numel() for batch in batches)
            if now.stage_step % 10 == 0:
                passed, since = time.monotonic() - since, time.monotonic()
                now.seconds += passed
                self.say(
                    f"{stage.name} {now.stage_step} step {now.step} loss {now.loss:.4f} "
                    f"codes {now.accuracy:.4f} prose {now.prose_loss:.4f} "
                    f"rate {self.rate(stage):.5f} tokens/s {tokens / passed:.0f} "
                    f"seconds {now.seconds:.0f}"
                )
                tokens = 0
            if now.stage_step % 50 == 0:
                self.save()
            if now.stage_step >= 80 and now.accuracy >= stage.until:
                break
        now.stage, now.stage_step = now.stage + 1, 0
        self.save()

    def run(self) -> None:
        """Train from where `progress` stands to the end of the curriculum."""
        while self.progress.stage < len(STAGES):
            self.run_stage(STAGES[self.progress.stage])

    def save(self) -> None:
        """Write a checkpoint, whole or not at all, and the model beside it."""
        if self.rank:
            return
        now = self.progress
        state = {
            "network": self.network.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "progress": {name: getattr(now, name) for name in Progress.__slots__},
        }
        part = self.out / "checkpoint.part"
        torch.save(state, part)
        part.replace(self.out / "checkpoint.pt")
        self.export()

    def load(self) -> None:
        """Go on from the checkpoint in the output folder."""
        state = torch.load(self.out / "checkpoint.pt", map_location=self.device)
        self.network.load_state_dict(state["network"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.progress = Progress(**state["progress"])

    def export(self) -> None:
        """Write the model as a Hugging Face folder, weights in half precision."""
        folder = self.out / "model"
        save_tokenizer(self.tokenizer, folder)
        config = self.network.shape.hf_config(self.encoder.end, self.encoder.pad)
        generation = {
            "do_sample": False,
            "eos_token_id": [self.encoder.end, self.encoder.pad],
            "pad_token_id": self.encoder.pad,
        }
        for name, value in (("config", config), ("generation_config", generation)):
            (folder / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n", "utf-8")
        weights = hf_weights(self.network, torch.float16)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def work(rank: int, arguments: argparse.Namespace) -> None:
    """Train as one of the processes."""
    torch.set_num_threads(arguments.threads)
    ranks = arguments.processes
    if ranks > 1:
        meeting = f"file://{(arguments.out / 'store').resolve()}"
        distributed.init_process_group("gloo", meeting, rank=rank, world_size=ranks)
    trainer = Trainer(
        arguments.out, arguments.seed, arguments.device, rank, ranks, arguments.compile, arguments.new_tokenizer
    )
    if arguments.resume:
        trainer.load()
    trainer.run()


def main() -> None:
    """Read the arguments and train.

    On a processor, one thread in each of two processes that meet once a step loses less to
    other programs than two threads that meet in each operation.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="checkpoints, log and model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="compile the network: pays in long runs on idle cores")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--new-tokenizer", action="store_true", help="build one from the grammar as it is now")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "store").unlink(missing_ok=True)
    if arguments.processes == 1:
        work(0, arguments)
    else:
        spawn(work, (arguments,), arguments.processes)


if __name__ == "__main__":
    main()

"""A model, a set of prompts, and engines so small that every sequence is preempted repeatedly."""

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.conformance.bench import EngineBench
from tests.conformance.models import VOCAB_SIZE, make_checkpoint
from tiercel.settings.settings import PreemptionMode
from tiercel.values.request import SamplingParams
from tiercel.values.tier import Tier

MARGIN = 1e-4
OUTPUTS = 64  # tokens
BLOCK = 16
MODES: tuple[PreemptionMode, ...] = ("swap", "auto", "recompute")


@dataclass(frozen=True)
class Answers:
    """Prompts and the tokens of transformers, with the margin of each token over the next likeliest one."""

    folder: Path
    prompts: list[list[int]]
    tokens: list[list[int]]
    margins: list[list[float]]


def make_answers(folder: Path, prompts: int = 64, seed: int = 3) -> Answers:
    """Make a Llama of three layers with random float32 weights; half of the prompts share prefixes."""
    torch.set_num_threads(1)
    model = make_checkpoint("llama3", folder, seed=11, std=0.15)
    rng = random.Random(seed)
    heads = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(32, 96))] for _ in range(4)]
    asked: list[list[int]] = []
    for number in range(prompts):
        head = heads[number % len(heads)] if number % 2 else []
        asked.append([*head, *(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(8, 72)))])
    tokens: list[list[int]] = []
    margins: list[list[float]] = []
    for prompt in asked:
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=OUTPUTS, min_new_tokens=OUTPUTS, do_sample=False, eos_token_id=None,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        top = torch.cat(output.logits).float().topk(2).values
        tokens.append(output.sequences[0, len(prompt) :].tolist())
        margins.append((top[:, 0] - top[:, 1]).tolist())
    return Answers(folder, asked, tokens, margins)


@dataclass
class Tally:
    """The counts of all engines so far."""

    requests: int = 0
    tokens: int = 0
    lost: int = 0  # missing tokens
    wrong: int = 0  # tokens that differ although the margin is large
    excused: int = 0  # requests that differ after a tie; later tokens are not compared
    preempted: Counter[str] = field(default_factory=Counter)  # by mode
    hit_tokens: Counter[str] = field(default_factory=Counter)  # by tier

    @property
    def preemptions(self) -> int:
        return self.preempted.total()

    def compare(self, got: list[int], expected: list[int], margins: list[float]) -> None:
        """Compare the tokens of an ended request."""
        self.requests += 1
        self.tokens += len(got)
        self.lost += max(0, len(expected) - len(got))
        for mine, right, margin in zip(got, expected, margins, strict=False):
            if mine != right:
                if margin < MARGIN:
                    self.excused += 1
                    return
                self.wrong += 1


def churn(answers: Answers, tally: Tally, folder: Path, preemptions: int, seed: int, *, is_checked: bool) -> None:
    """Run engines of all modes on the same SSD folder, until `preemptions` preemptions have happened.

    `is_checked`: check every book after every step.
    """
    rng = random.Random(seed)
    share = -(-preemptions // len(MODES))
    for mode in MODES:
        one = EngineBench(
            answers.folder, max_model_len=256, max_num_seqs=24, num_gpu_blocks_override=36, cpu_device_pool=True,
            kv_host_bytes=1 << 20, kv_disk_paths=(str(folder),), kv_disk_bytes=12 << 20, preemption_mode=mode,
            max_num_batched_tokens=128, seed=seed,
        )  # fmt: skip
        one.is_checked = is_checked
        while one.gauges.preemptions < share:
            numbers = rng.sample(range(len(answers.prompts)), min(32, len(answers.prompts)))
            asked = SamplingParams(temperature=0.0, max_tokens=OUTPUTS, ignore_eos=True)
            seqs = {number: one.submit(answers.prompts[number], asked) for number in numbers}
            one.run()
            if rng.random() < 0.25:
                one.settle()  # sometimes let idle work finish
            for number, seq in seqs.items():
                tally.compare(one.inbox.tokens.pop(seq, []), answers.tokens[number], answers.margins[number])
        one.settle()
        gauges = one.gauges
        tally.preempted["swap"] += gauges.preemptions_swap
        tally.preempted["recompute"] += gauges.preemptions_recompute
        for tier in gauges.tiers:
            tally.hit_tokens[tier.tier.value] += tier.hit_tokens
        one.close()


def has_used_all_tiers(tally: Tally) -> bool:
    """Return whether both ways of preemption and all tiers were used."""
    ways = all(tally.preempted[how] for how in ("swap", "recompute"))
    return ways and all(tally.hit_tokens[tier.value] for tier in (Tier.HBM, Tier.DDR, Tier.SSD))

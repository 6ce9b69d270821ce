"""A whole decoder on the kernels against the reference backend, with slices of every kind."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conformance.models import VOCAB_SIZE, make_checkpoint
from tests.engine.attention.scene import KERNEL_DEVICE, open_triton
from tests.engine.models.paged_run import PagedRun
from tiercel.engine.attention.base import Attention
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.models.registry import load_model
from tiercel.settings.settings import EngineSettings

CPU = torch.device("cpu")
TOLERANCE = 1e-4  # of a logit, float32
# Per step: (sequence, tokens computed before, tokens of this step).
STEPS = [
    [(0, 0, 40), (1, 0, 7)],
    [(0, 40, 1), (1, 7, 20)],
    [(0, 41, 1), (1, 27, 1)],
]


def logits_of(folder: Path, attention: Attention) -> list[Tensor]:
    torch.set_num_threads(1)
    settings = EngineSettings(model=str(folder), dtype="float32")
    run = PagedRun(load_model(settings, CPU, attention), 2, 48)
    tokens = torch.randint(3, VOCAB_SIZE, (2, 48), generator=torch.Generator().manual_seed(1))
    steps = [[(row, start, tokens[row, start : start + length]) for row, start, length in step] for step in STEPS]
    return [logits for step in steps for logits in run.step(step)]


@pytest.mark.skipif(KERNEL_DEVICE != CPU, reason="the interpreter is for machines without a GPU")
def test_logits_are_those_of_the_reference(tmp_path: Path) -> None:
    make_checkpoint("mistral", tmp_path, seed=7)  # groups of heads, and a window

    ours, reference = logits_of(tmp_path, open_triton()), logits_of(tmp_path, SdpaAttention())

    for mine, wanted in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine, wanted, atol=TOLERANCE, rtol=0)

"""The operators that sampling runs."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tiercel.engine.sampling import Sampler
from tiercel.values.request import SamplingParams, pack_tokens

VOCAB_SIZE = 50
GREEDY = SamplingParams(temperature=0.0)
EVERY_KIND = [
    GREEDY,
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=0.0, frequency_penalty=1.0, presence_penalty=0.5),
    SamplingParams(temperature=0.0, logit_bias=((3, 1.0),), min_tokens=2),
    SamplingParams(logit_bias=((3, 1.0),), min_tokens=2, stop_token_ids=(4,), repetition_penalty=1.2),
    SamplingParams(min_p=0.1),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.9),
    SamplingParams(top_k=5, top_p=0.9, logprobs=0),
    SamplingParams(),
]


class _KernelLog(TorchDispatchMode):
    """Collects the names of all operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def operators(params):
    """Return the operators of filling these rows and sampling them once."""
    logits = torch.randn(len(params), VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    sampler = Sampler(len(params), VOCAB_SIZE, torch.device("cpu"))
    rows = list(range(len(params)))
    with _KernelLog() as log:
        for row in rows:
            sampler.set_row(row, params[row], pack_tokens([3, 4]), pack_tokens([5]), (0,))
        sampler.sample_no_sync(logits, rows, [3] * len(rows), [1] * len(rows))
    return log.names


@pytest.mark.parametrize("params", [EVERY_KIND, *([each] * 3 for each in EVERY_KIND)])
def test_no_operator_waits_for_the_device(params):
    waiting = (
        "_local_scalar",
        "nonzero",
        "masked_select",
        "unique",
        "index.Tensor",
        "index_put",
        "is_nonzero",
        "equal",
    )
    assert not [name for name in operators(params) if name.removeprefix("aten::").startswith(waiting)]


def test_greedy_rows_run_one_maximum_and_a_check():
    assert len(operators([GREEDY] * 64)) <= 5


def test_plain_draws_run_no_operator_of_other_features():
    plain = set(operators([SamplingParams(seed=1)] * 64))
    assert not plain & {
        "aten::topk",
        "aten::_softmax",
        "aten::cumsum",
        "aten::scatter_add_",
        "aten::masked_fill_.Scalar",
    }

"""The self-test of sampling."""

import math

import torch
from torch import Tensor

from tiercel.engine.native.self_tests.base import SelfTest
from tiercel.engine.native.table import TYPE_BY_DTYPE, KernelTable

_VOCAB_SIZE = 300  # two whole blocks and a part of one
_DRAWS = (  # temperature, log_min_p, top_p, top_k
    (0.0, -math.inf, math.inf, 0),
    (0.7, -math.inf, math.inf, 0),
    (1.3, -2.0, math.inf, 0),
    (1.3, -math.inf, 0.8, 0),
    (1.3, -math.inf, math.inf, 9),
    (2.0, -5.0, 0.5, 50),
)


def _run_draw_rows(table: KernelTable) -> list[Tensor]:
    """Return the tokens one-hot: a token that differs is an error of 1."""
    results: list[Tensor] = []
    rows = len(_DRAWS)
    words = torch.randint(-(2**31), 2**31, (rows, -(-_VOCAB_SIZE // 32)), generator=torch.Generator().manual_seed(2))
    bits = words.to(torch.int32)
    masks = torch.tensor([row.data_ptr() for row in bits])
    masks[0] = 0  # this row may draw all tokens
    for dtype, kind in TYPE_BY_DTYPE.items():
        logits = (3 * torch.randn(rows, _VOCAB_SIZE, generator=torch.Generator().manual_seed(1))).to(dtype)
        draws = torch.tensor([(0.0, 0.0, *draw) for draw in _DRAWS]).view(torch.int32)
        draws[:, :2] = torch.arange(2 * rows).view(rows, 2) * 104_729
        draws[:, 5] = torch.tensor([draw[3] for draw in _DRAWS])
        room = torch.empty(torch.get_num_threads() * 4 * 384)
        for masks_pointer in (None, masks.data_ptr()):
            tokens, bad_rows = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.bool)
            table.draw_rows(
                *(kind, logits.data_ptr(), _VOCAB_SIZE, rows, _VOCAB_SIZE, draws.data_ptr(), masks_pointer),
                *(room.data_ptr(), tokens.data_ptr(), bad_rows.data_ptr()),
            )
            results += [torch.nn.functional.one_hot(tokens, _VOCAB_SIZE).float(), bad_rows.float()]
    return results


CHECKS = (SelfTest(("draw_rows",), _run_draw_rows),)

"""Kernels that read and write host memory, against plain torch."""

import pytest
import torch
from torch import Tensor

from tiercel.engine.kernels.host_memory import move_no_sync, report_no_sync, take_inputs_no_sync

pytestmark = pytest.mark.usefixtures("poisoned")


def random_bytes(count: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("words", "patches"), [(0, 0), (8, 0), (0, 1), (16, 3), (248, 256), (256, 257), (1000, 600)])
def test_inputs_and_patches_of_tables_arrive_and_nothing_else_changes(words: int, patches: int) -> None:
    rows, blocks = 40, 50
    places = torch.randperm(rows * blocks, generator=torch.Generator().manual_seed(words))[:patches]
    pairs = torch.stack((places, places * 7 + 1), dim=1)
    source = torch.cat((random_bytes(8 * words, words), pairs.view(-1).view(torch.uint8), random_bytes(64, 1)))
    target, tables = random_bytes(8 * words + 72, 2), torch.arange(rows * blocks).view(rows, blocks)
    wanted, wanted_tables = target.clone(), tables.clone()
    wanted[: 8 * words] = source[: 8 * words]
    wanted_tables.view(-1)[places] = places * 7 + 1

    take_inputs_no_sync(source, target, 8 * words, tables, patches)

    assert torch.equal(target, wanted)
    assert torch.equal(tables, wanted_tables)


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (255,), (256,), (4, 333)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_every_type_of_result_is_moved(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3)).mul(9).to(dtype)
    room = torch.zeros(values.numel() + 2, dtype=dtype)
    target = room[1:-1].view(shape)

    move_no_sync(values, target)

    assert torch.equal(target, values)
    assert not room[[0, -1]].any()


@pytest.mark.parametrize("count", [0, 1, 7, 256, 300])
def test_results_are_reported_and_last_tokens_noted(count: int) -> None:
    random = torch.Generator().manual_seed(count)
    tokens, bad_rows = torch.randint(0, 1 << 40, (count,), generator=random), torch.rand(count, generator=random) < 0.3
    rows, last_tokens = torch.randperm(400, generator=random)[:count], torch.arange(400)
    wanted = last_tokens.index_copy(0, rows, tokens)
    host = torch.full((count + 1,), -1), torch.ones(count + 1, dtype=torch.bool)

    report_no_sync(tokens, bad_rows, rows, last_tokens, host[0][:count], host[1][:count])

    assert torch.equal(host[0], torch.cat((tokens, torch.tensor([-1]))))
    assert torch.equal(host[1], torch.cat((bad_rows, torch.tensor([True]))))
    assert torch.equal(last_tokens, wanted)

"""A block table alone."""

import random
from array import array

import numpy as np
import pytest

from tests.seeds import fresh_seeds
from tiercel.kvcache.table import BlockTable
from tiercel.kvcache.tenant_holding import TenantHolding
from tiercel.values.ids import BlockKey, SeqId


@pytest.mark.parametrize("seed", [*range(20), *fresh_seeds(10)])
def test_the_index_of_a_table_follows_every_change_of_its_slots(seed: int) -> None:
    rng = random.Random(seed)
    table = BlockTable(SeqId(1), BlockKey(b"root"), array("I"), 0, TenantHolding())
    free = list(range(1, 2000))
    for _ in range(60):
        match rng.randrange(4):
            case 0 | 1:
                count = rng.choice((1, 3, 40))
                table.extend(np.array(free[:count], np.intp) if rng.random() < 0.5 else free[:count])
                del free[:count]
            case 2 if table.slots:
                table.replace(rng.randrange(len(table.slots)), free.pop())
            case _:
                table.cut(rng.randint(0, len(table.slots)))
        table.num_published = rng.randint(0, len(table.slots))
        assert table.held().slots.tolist() == table.slots.tolist(), seed
        assert table.published().slots.tolist() == table.slots[: table.num_published].tolist(), seed
        book = np.arange(2000)
        assert table.published().read(book).tolist() == table.slots[: table.num_published].tolist(), seed

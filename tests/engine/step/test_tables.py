"""Block tables on the device equal those of the host after every patch."""

import random

import numpy as np
import pytest
import torch

from tiercel.engine.step.rows import RowBook
from tiercel.engine.step.tables import DeviceTables
from tiercel.values.ids import SeqId, SlotId
from tiercel.values.plan import TableUpdate

CPU = torch.device("cpu")


def test_patches_name_places_with_the_slots_of_the_host() -> None:
    rows = RowBook(3, 5)
    updates = (TableUpdate(SeqId(7), 0, (SlotId(4), SlotId(9))), TableUpdate(SeqId(7), 1, (SlotId(8),)))
    rows.update(updates)
    row = rows.row_by_seq[SeqId(7)]
    assert rows.patches(updates).tolist() == [[5 * row, 4], [5 * row + 1, 8], [5 * row + 1, 8]]
    assert rows.patches(()).shape == (0, 2)


def test_of_changes_that_were_not_sent_the_newest_counts() -> None:
    tables = DeviceTables.open(2, 4, CPU)
    tables.note(np.array([[1, 5], [6, 7]]))
    tables.note(np.array([[6, 8], [0, 3]]))
    tables.note(np.empty((0, 2), np.int64))
    assert sorted(tables.unsent().tolist()) == [[0, 3], [1, 5], [6, 8]]
    assert sorted(tables.unsent().tolist()) == [[0, 3], [1, 5], [6, 8]]  # as long as they are not sent
    tables.mark_sent()
    assert tables.unsent().shape == (0, 2)


@pytest.mark.parametrize("seed", range(10))
def test_random_updates_give_the_tables_of_the_host_however_many_wait(seed: int) -> None:
    rng = random.Random(seed)
    rows, tables = RowBook(6, 20), DeviceTables.open(6, 20, CPU)
    lengths: dict[int, int] = {}
    for _ in range(300):
        updates: list[TableUpdate] = []
        for _ in range(rng.randrange(4)):
            seq = rng.randrange(9)
            if seq not in lengths and len(lengths) == 6:
                gone = rng.choice(sorted(lengths))
                del lengths[gone]
                rows.release([SeqId(gone)])
                updates = [update for update in updates if update.seq != gone]
            first = rng.randrange(lengths.get(seq, 0) + 1)
            slots = tuple(SlotId(rng.randrange(1, 1000)) for _ in range(rng.randrange(20 - first)))
            updates.append(TableUpdate(SeqId(seq), first, slots))
            rows.update(updates[-1:])
            lengths[seq] = max(lengths.get(seq, 0), first + len(slots))
        tables.note(rows.patches(updates))
        if rng.random() < 0.6:
            tables.apply(tables.unsent())
            for seq, length in lengths.items():
                row = rows.row_by_seq[SeqId(seq)]
                found = tables.gather_no_sync(torch.tensor([row]), length)
                assert found.tolist() == [rows.tables[row, :length].tolist()]

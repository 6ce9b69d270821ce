"""The journal of answers after a crash: whole lines are found, torn ones are cut off."""

import json
import random
import resource
from pathlib import Path

import pytest

from tests.seeds import fresh_seeds
from tiercel.server.batch.journal import AnswerJournal
from tiercel.values.clock import MonotonicClock


def opened(path: Path) -> AnswerJournal:
    journal = AnswerJournal(path, MonotonicClock())
    journal.open()
    return journal


def answer(number: int, filler: str = "") -> bytes:
    return json.dumps({"custom_id": str(number), "response": {"body": filler}}).encode() + b"\n"


@pytest.mark.parametrize("seed", [1, *fresh_seeds(1)])
def test_a_journal_cut_or_damaged_anywhere_keeps_its_whole_lines(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "out"
    for _ in range(100):
        texts = [answer(number, "é" * rng.randrange(50)) for number in range(rng.randrange(1, 8))]
        data = b"".join(texts)
        cut = rng.randrange(len(data) + 1)
        tail = rng.choice([b"", b"\0" * rng.randrange(100), b"\n", b"{}\n", b"garbage\n" + answer(99)])
        path.write_bytes(data[:cut] + tail)
        whole = [str(number) for number in range(len(texts)) if sum(map(len, texts[: number + 1])) <= cut]
        journal = opened(path)
        # a line whose end was cut may be completed by the tail
        found = list(journal.answered)
        assert found[: len(whole)] == whole and len(found) <= len(whole) + 1, f"seed {seed}: {path.read_bytes()!r}"
        journal.append(answer(100))
        journal.close()
        again = opened(path)
        assert list(again.answered) == [*found, "100"], f"seed {seed}"
        again.close()


def test_a_new_journal_is_empty_and_can_be_removed(tmp_path: Path) -> None:
    journal = opened(tmp_path / "out")
    assert (journal.size_bytes, list(journal.answered)) == (0, [])
    journal.append(answer(1))
    assert journal.size_bytes == len(answer(1))
    journal.close()
    journal.close()
    journal.remove()
    journal.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_the_disk_takes_in_part_is_taken_back(tmp_path: Path) -> None:
    journal = opened(tmp_path / "out")
    journal.append(answer(1, "x" * 500))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            journal.append(answer(2, "y" * 700))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "out").read_bytes() == answer(1, "x" * 500)
    journal.append(answer(3))
    journal.close()
    assert list(opened(tmp_path / "out").answered) == ["1", "3"]

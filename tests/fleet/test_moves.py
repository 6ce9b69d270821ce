"""Places of sequences: never on a dead engine, never on two, none forgotten, on random walks of a fleet that dies."""

import random

import pytest

from tests.seeds import fast_and_slow, fresh_seeds
from tiercel.fleet.moves import Moves, Recall, SequenceMove
from tiercel.fleet.prefix_index import PrefixIndex
from tiercel.fleet.router import PromptWork, Router
from tiercel.values.errors import InvariantError
from tiercel.values.ids import EngineId, SeqId, TenantId
from tiercel.values.rates import EngineSpeed

SPEED = EngineSpeed()
E0, E1, E2 = map(EngineId, range(3))
SEEDS = fast_and_slow([*range(8), *fresh_seeds(3)], range(8, 80))


def work_of(seq: SeqId) -> PromptWork:
    return PromptWork(tenant=TenantId(f"t{seq % 3}"), num_tokens=100 + seq % 700, max_outputs=50)


def moves_of(*engines: EngineId, seed: int = 0) -> Moves:
    moves = Moves(Router(PrefixIndex(), random.Random(seed)), work_of)
    for engine in engines:
        moves.join(engine, SPEED)
    return moves


def seqs(*numbers: int) -> list[SeqId]:
    return list(map(SeqId, numbers))


def test_sequences_of_a_dead_engine_go_on_at_others() -> None:
    moves = moves_of(E0, E1)
    for seq in range(20):
        moves.submit(seqs(seq))
    lost = [seq for seq in seqs(*range(20)) if moves.engine_of(seq) == E0]
    assert moves.lose(E0) == [SequenceMove(seq, E1) for seq in lost]
    assert moves.lose(E0) == []


def test_the_sequence_that_killed_an_engine_is_not_resumed() -> None:
    moves = moves_of(E0, E1)
    engine = moves.submit(seqs(1))
    assert engine is not None
    moves.end(SeqId(1))
    assert moves.lose(engine) == []
    assert moves.engine_of(SeqId(1)) is None


def test_sequences_wait_for_an_engine_in_their_order() -> None:
    moves = moves_of(E0)
    moves.submit(seqs(1, 2))
    assert moves.lose(E0) == [SequenceMove(SeqId(1), None), SequenceMove(SeqId(2), None)]
    assert moves.submit(seqs(3)) is None
    assert moves.unplaced == (1, 2, 3)
    moves.end(SeqId(2))
    assert moves.join(E1, SPEED) == [SequenceMove(SeqId(1), E1), SequenceMove(SeqId(3), E1)]
    assert moves.unplaced == ()


def test_the_choices_of_a_request_begin_at_one_engine() -> None:
    moves = moves_of(E0, E1, E2)
    engine = moves.submit(seqs(1, 2, 3))
    assert {moves.engine_of(seq) for seq in seqs(1, 2, 3)} == {engine}
    with pytest.raises(InvariantError, match=r"router\.twice"):
        moves.submit(seqs(2))


def test_waiting_sequences_move_to_a_new_engine() -> None:
    moves = moves_of(E0)
    for seq in range(20):
        moves.submit(seqs(seq))
    moves.note_first_token(SeqId(19))
    moves.join(E1, SPEED)
    recalls = moves.recall()
    assert 5 <= len(recalls) <= 12
    assert Recall(SeqId(18), E0) in recalls
    assert Recall(SeqId(19), E0) not in recalls
    assert moves.engine_of(SeqId(18)) == E0  # until the engine has let it go
    assert moves.give_back(SeqId(18)) == SequenceMove(SeqId(18), E1)
    assert moves.give_back(SeqId(18)) is None
    begun = recalls[1].seq
    moves.note_first_token(begun)  # the engine had begun with it, and keeps it
    assert moves.give_back(begun) is None
    moves.check_integrity()


def test_nothing_moves_between_engines_that_are_even() -> None:
    moves = moves_of(E0, E1)
    for seq in range(40):
        moves.submit(seqs(seq))
    assert moves.recall() == []


def test_a_draining_engine_gives_back_what_waits_and_loses_the_rest_with_its_end() -> None:
    moves = moves_of(E0, E1)
    for seq in range(20):
        moves.submit(seqs(seq))
    there = [seq for seq in seqs(*range(20)) if moves.engine_of(seq) == E0]
    moves.note_first_token(there[0])
    assert moves.drain(E0) == [Recall(seq, E0) for seq in there[1:]]
    assert moves.submit(seqs(100)) == E1
    assert moves.give_back(there[1]) == SequenceMove(there[1], E1)
    assert moves.lose(E0) == [SequenceMove(seq, E1) for seq in there if seq != there[1]]


class WalkingFleet:
    """Engines as sets of sequences, which act on moves; a sequence submitted where it is already is an error."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.moves = moves_of(seed=seed)
        self.engines: dict[EngineId, set[SeqId]] = {}
        self.begun: set[SeqId] = set()
        self.asked: list[Recall] = []
        self.live: set[SeqId] = set()
        self.count = 0

    def apply(self, moves: list[SequenceMove]) -> None:
        for move in moves:
            assert not any(move.seq in held for held in self.engines.values())
            self.begun.discard(move.seq)
            if move.target is not None:
                self.engines[move.target].add(move.seq)

    def act(self) -> None:
        rng, moves = self.rng, self.moves
        engine = rng.choice(list(self.engines)) if self.engines else EngineId(-1)
        held = sorted(self.engines.get(engine, ()))
        match rng.randrange(12):
            case 0 | 1 | 2:
                self.count += 3
                new = seqs(*range(self.count, self.count + rng.randint(1, 3)))
                target = moves.submit(new)
                self.live |= set(new)
                if target is not None:
                    self.engines[target] |= set(new)
            case 3 if len(self.engines) < 6:
                self.count += 1
                self.engines[EngineId(self.count)] = set()
                self.apply(moves.join(EngineId(self.count), SPEED))
            case 4 if rng.random() < 0.5 and self.engines:
                if held and rng.random() < 0.5:
                    moves.end(held[0])  # it was the cause
                    self.live.discard(held[0])
                self.begun -= self.engines.pop(engine)
                self.apply(moves.lose(engine))
            case 5 | 6 if held:
                seq = rng.choice(held)
                self.begun.add(seq)
                moves.note_first_token(seq)
            case 7 | 8 if held:
                seq = rng.choice(held)
                self.engines[engine].discard(seq)
                self.live.discard(seq)
                moves.end(seq, rng.randint(1, 100))
            case 9:
                self.asked += moves.recall()
            case 10 if rng.random() < 0.3:
                self.asked += moves.drain(engine)
            case _:
                self.answer()

    def answer(self) -> None:
        """An engine answers a recall, perhaps late: it gives the sequence back only if it has it and had not begun."""
        if not self.asked:
            return
        recall = self.asked.pop(self.rng.randrange(len(self.asked)))
        held = self.engines.get(recall.engine, set())
        if recall.seq in held and recall.seq not in self.begun:
            held.remove(recall.seq)
            move = self.moves.give_back(recall.seq)
            assert move is not None
            self.apply([move])

    def check(self) -> None:
        self.moves.check_integrity()
        placed = [seq for held in self.engines.values() for seq in held]
        assert sorted([*placed, *self.moves.unplaced]) == sorted(self.live)
        assert all(self.moves.engine_of(seq) == engine for engine, held in self.engines.items() for seq in held)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_sequence_is_at_one_living_engine_or_waits_for_one(seed: int) -> None:
    fleet = WalkingFleet(seed)
    for _ in range(400):
        fleet.act()
        fleet.check()
    fleet.engines[EngineId(10**6)] = set()
    fleet.apply(fleet.moves.join(EngineId(10**6), SPEED))
    assert fleet.moves.unplaced == ()
    fleet.check()

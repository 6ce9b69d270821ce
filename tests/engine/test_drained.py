"""The blocks of sequences that a drain ends early: the SSD tier gets them, whatever stage the sequence was in."""

from tests.engine.test_loop_tiers import BLOCK, TierBench
from tiercel.values.block_key import child_key, namespace_key
from tiercel.values.ids import SeqId
from tiercel.values.outcome import SequenceState
from tiercel.values.request import pack_tokens, unpack_tokens
from tiercel.wire.frames import Abort


def blocks_on_disk(bench: TierBench, seq: SeqId) -> int:
    """Return how many blocks of a sequence the disk holds, head first."""
    disk = bench.cache.tiers.disk
    assert disk is not None
    tokens = [*unpack_tokens(bench.requests[seq].prompt), *bench.client.tokens.get(seq, [])]
    key, blocks = namespace_key(b"sim", b""), 0
    while (blocks + 1) * BLOCK <= len(tokens):
        key = child_key(key, pack_tokens(tokens[blocks * BLOCK : (blocks + 1) * BLOCK]))
        if key not in disk.slot_by_key:
            break
        blocks += 1
    return blocks


def test_running_and_preempted_sequences_that_are_aborted_go_to_the_disk() -> None:
    bench = TierBench(blocks=24, host=60, disk=100, seqs=8)
    seqs = [bench.submit([number] * 12, max_tokens=50) for number in range(8)]
    states = dict.fromkeys(seqs, SequenceState.WAITING)
    while not {SequenceState.RUNNING, SequenceState.PREEMPTED} <= set(states.values()):
        assert bench.step()
        states = {seq: bench.book[seq].state for seq in seqs}
    bench.loop.take([Abort(tuple(seqs))])
    for _ in range(2000):
        if not bench.loop.has_unsaved:
            break
        bench.step()
    bench.run()
    for seq in seqs:
        if states[seq] in (SequenceState.RUNNING, SequenceState.PREEMPTED) and seq in bench.client.tokens:
            assert blocks_on_disk(bench, seq) >= (12 + len(bench.client.tokens[seq])) // BLOCK - 1, states[seq]

"""`Abort.if_queued`: sequences end only if none of them has been admitted."""

import pytest

from tests.engine.test_loop import Bench
from tiercel.values.outcome import FinishReason
from tiercel.wire.frames import Abort


def test_sequences_that_wait_end_with_the_reason_and_hold_nothing() -> None:
    bench = Bench(seqs=1)
    first, second, third = (bench.submit([number] * 9, max_tokens=20, ignore_eos=True) for number in range(3))
    bench.loop.step()
    bench.loop.take([Abort((second, third), FinishReason.TIMEOUT, if_queued=True)])
    bench.loop.check_integrity()
    bench.run()
    bench.assert_all_right()
    reasons = {seq: finished.reason for seq, finished in bench.client.finished.items()}
    assert reasons == {first: FinishReason.LENGTH, second: FinishReason.TIMEOUT, third: FinishReason.TIMEOUT}


@pytest.mark.parametrize("steps", [1, 60])
def test_a_request_that_has_begun_or_ended_goes_on(steps: int) -> None:
    bench = Bench(seqs=1)
    first, second = (bench.submit([number] * 9, max_tokens=20, ignore_eos=True) for number in range(2))
    for _ in range(steps):
        bench.loop.step()
    bench.loop.take([Abort((first, second), FinishReason.TIMEOUT, if_queued=True)])
    bench.run()
    bench.assert_all_right()
    assert {finished.reason for finished in bench.client.finished.values()} == {FinishReason.LENGTH}

"""Which chains go to the disk first."""

from kvcache.chain import Chain, ChainQueue
from tiercel.ids import BlockKey


def chain(saving_s: float, *, is_once: bool = True) -> Chain:
    return Chain((BlockKey(bytes(32)),), saving_s, is_once=is_once)


def drained(queue: ChainQueue) -> list[float]:
    order = []
    while queue.first is not None:
        order.append(queue.first.saving_s)
        queue.pop()
    return order


def test_reused_chains_go_first_and_then_the_dearest() -> None:
    queue = ChainQueue()
    for saving_s in (1.0, 3.0, 2.0):
        queue.push(chain(saving_s))
    queue.push(chain(0.5, is_once=False))
    assert drained(queue) == [0.5, 3.0, 2.0, 1.0]


def test_what_was_set_aside_comes_back_the_best_first_and_in_bounds() -> None:
    queue = ChainQueue()
    for saving_s in (1.0, 3.0, 2.0):
        queue.push(chain(saving_s))
    for _ in range(3):
        queue.set_aside()
    assert (len(queue), queue.num_aside) == (0, 3)
    queue.recall(2)
    assert queue.num_aside == 1
    assert drained(queue) == [3.0, 2.0]

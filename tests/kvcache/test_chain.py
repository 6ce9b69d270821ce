"""The order in which chains go to the disk, and the limits on them."""

from tiercel.kvcache.chain import Chain, ChainQueue, WrittenChains
from tiercel.values.ids import BlockKey


def chain(saving_s: float, *, is_once: bool = True, blocks: int = 1) -> Chain:
    return Chain([BlockKey(bytes([block]) * 32) for block in range(blocks)], saving_s, is_once=is_once)


def drained(queue: ChainQueue) -> list[float]:
    order = []
    while queue.first is not None:
        order.append(queue.first.saving_s)
        queue.pop()
    return order


def test_reused_chains_go_first_and_then_the_most_expensive() -> None:
    queue = ChainQueue(100)
    for saving_s in (1.0, 3.0, 2.0):
        queue.push(chain(saving_s))
    queue.push(chain(0.5, is_once=False))
    assert drained(queue) == [0.5, 3.0, 2.0, 1.0]


def test_chains_set_aside_are_recalled_best_first_up_to_a_limit() -> None:
    queue = ChainQueue(100)
    for saving_s in (1.0, 3.0, 2.0):
        queue.push(chain(saving_s))
    for _ in range(3):
        queue.set_aside()
    assert (len(queue), queue.num_aside) == (0, 3)
    queue.recall(2)
    assert queue.num_aside == 1
    assert drained(queue) == [3.0, 2.0]


def test_a_chain_returns_its_keys() -> None:
    one = chain(1.0, blocks=5)
    assert len(one) == 5
    assert one[3] == bytes([3]) * 32
    assert one.keys(-2, 2) == [bytes(32), bytes([1]) * 32]
    assert one.keys(4, 99) == [bytes([4]) * 32]


def test_chains_are_limited_by_their_keys_and_the_cheapest_are_forgotten() -> None:
    queue = ChainQueue(100)
    for number in range(50):
        queue.push(chain(float(number), blocks=10))
        assert queue.num_keys <= 100
        if number % 3 == 0:
            queue.set_aside()
    queue.recall(100)
    left = drained(queue)
    assert left == sorted(left, reverse=True)
    assert left[0] == 49.0
    assert queue.num_keys == 0


def test_chains_no_longer_in_memory_are_forgotten_before_cheaper_chains() -> None:
    gone = {9.0, 8.0}
    queue = ChainQueue(30, lambda one: one.saving_s not in gone)
    for saving_s in (9.0, 1.0, 8.0, 2.0):
        queue.push(chain(saving_s, blocks=10))
    assert drained(queue) == [2.0, 1.0]


def test_the_newest_of_equal_chains_is_kept() -> None:
    queue = ChainQueue(30)
    chains = [chain(1.0, blocks=10) for _ in range(4)]
    for one in chains:
        queue.push(one)
    assert queue.first is chains[-1]


def test_written_chains_are_limited_and_the_oldest_are_forgotten() -> None:
    queue = WrittenChains(25)
    chains = [chain(1.0, blocks=10) for _ in range(4)]
    for one in chains:
        queue.push(one)
    assert queue.num_keys == 20
    assert queue.first is chains[2]

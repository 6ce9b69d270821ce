"""The gate of batch lines: bytes at a time, in order, a large line alone."""

import asyncio

from tiercel.server.batch.byte_gate import ByteGate


def test_what_has_passed_keeps_the_limit_in_the_order_of_arrival() -> None:
    async def run() -> None:
        gate, passed = ByteGate(10), list[int]()

        async def enter(size: int) -> None:
            await gate.enter(size)
            passed.append(size)

        tasks: list[asyncio.Task[None]] = []
        for size in (6, 5, 1, 30, 2):
            tasks.append(asyncio.create_task(enter(size)))
            await asyncio.sleep(0)
        assert (passed, gate.held_bytes) == ([6], 6)  # 1 waits behind 5
        tasks[1].cancel()
        await asyncio.sleep(0.001)
        assert (passed, gate.held_bytes) == ([6, 1], 7)
        gate.leave(6)
        gate.leave(1)
        await asyncio.sleep(0.001)
        assert (passed, gate.held_bytes) == ([6, 1, 30], 30)
        gate.leave(30)
        await asyncio.sleep(0.001)
        gate.leave(2)
        assert (passed, gate.held_bytes) == ([6, 1, 30, 2], 0)

    asyncio.run(run())

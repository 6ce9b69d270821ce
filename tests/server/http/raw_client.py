"""A client of raw bytes, for requests that no HTTP library sends."""

import asyncio
import json
from dataclasses import dataclass
from typing import cast


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """One response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, object]:
        """The value of `error` in the body."""
        return cast(dict[str, dict[str, object]], json.loads(self.body))["error"]


def split_answers(received: bytes) -> list[RawAnswer]:
    """Split the responses of a connection, each with a length."""
    answers: list[RawAnswer] = []
    while received:
        head, found, rest = received.partition(b"\r\n\r\n")
        assert found, received
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        status = int(first.split()[1])
        if status == 100:
            received = rest
            continue
        length = int(headers["content-length"])
        answers.append(RawAnswer(status, headers, rest[:length]))
        received = rest[length:]
    return answers


async def exchange(port: int, *parts: bytes, end: bool = False, limit_s: float = 10.0) -> bytes:
    """Send parts, one write each, and return what the server sends until it closes the connection.

    With `end`, the client then ends its side. A connection that the server resets while the client sends counts as
    closed. Errors: TimeoutError.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = bytearray()

    async def read() -> None:
        while piece := await reader.read(65536):
            received.extend(piece)

    reading = asyncio.create_task(read())
    try:
        async with asyncio.timeout(limit_s):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            if end:
                writer.write_eof()
            await reading
    except TimeoutError:
        raise
    except OSError:
        pass
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        writer.close()
    return bytes(received)

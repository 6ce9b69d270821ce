"""The input of a batch: a file with one request on each line."""

from collections.abc import Collection, Iterator
from pathlib import Path

from tiercel.server.batch.line import MAX_LINES, WIDE_ENCODING, LineError, read_line
from tiercel.server.batch.records import BatchFault
from tiercel.server.http.byte_order import UTF8_MARK

_MAX_FAULTS = 100  # that are reported; the rest of the file is not read
_PIECE_BYTES = 1024 * 1024


def input_lines(path: Path, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield every line that is not blank with its number; the first is 1. A longer line than `max_bytes` is cut.

    Errors: OSError.
    """
    with path.open("rb") as file:
        number = 0
        while text := file.readline(max_bytes + 1):
            number += 1
            piece = text
            while not piece.endswith(b"\n") and (piece := file.readline(_PIECE_BYTES)):
                pass  # the rest of a long line
            if text.removeprefix(UTF8_MARK).strip():
                yield number, text.rstrip(b"\r\n")


def check_input(path: Path, endpoint: str, max_bytes: int) -> tuple[int, list[BatchFault]]:
    """Return the number of requests in a file, and the faults of its lines. Errors: OSError."""
    custom_ids: set[str] = set()
    faults: list[BatchFault] = []
    total = 0
    for number, text in input_lines(path, max_bytes):
        total += 1
        try:
            _check_line(text, endpoint, max_bytes, custom_ids)
        except LineError as exc:
            faults.append(exc.fault(number))
            if exc.code == WIDE_ENCODING:
                break
        if total > MAX_LINES:
            faults.append(BatchFault(code="too_many_lines", message=f"A batch can have at most {MAX_LINES} requests."))
        if len(faults) >= _MAX_FAULTS or total > MAX_LINES:
            break
    if not total:
        faults.append(BatchFault(code="empty_file", message="The file has no requests."))
    return total, faults


def _check_line(text: bytes, endpoint: str, max_bytes: int, custom_ids: set[str]) -> None:
    """Check one line, and add its id to the others. Errors: LineError."""
    if len(text) > max_bytes:
        raise LineError("line_too_long", f"The line is longer than {max_bytes} bytes.")
    custom_id = read_line(text, (endpoint,)).custom_id
    if custom_id in custom_ids:
        raise LineError("duplicate_custom_id", "custom_id: another line has the same.", "custom_id")
    custom_ids.add(custom_id)


class InputReader:
    """Reads the requests of a checked file a portion at a time. All calls wait for the disk."""

    def __init__(self, path: Path, endpoint: str, answered: Collection[str], max_bytes: int) -> None:
        self._lines = input_lines(path, max_bytes)
        self._endpoint = endpoint
        self._answered = answered

    def read(self, count: int) -> list[tuple[int, bytes]]:
        """Return the next requests without an answer, at most `count` and about a megabyte; none at the end.

        Errors: LineError if the file has changed since it was checked; OSError.
        """
        lines: list[tuple[int, bytes]] = []
        size = 0
        for number, text in self._lines:
            if read_line(text, (self._endpoint,)).custom_id not in self._answered:
                lines.append((number, text))
                size += len(text)
            if len(lines) >= count or size >= _PIECE_BYTES:
                break
        return lines

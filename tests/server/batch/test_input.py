"""The checks of the lines of an input."""

import json
from pathlib import Path

import pytest

from tests.server.batch.folder import CHAT, line, lines
from tiercel.server.batch.input import InputReader, check_input, input_lines
from tiercel.server.batch.line import LineError, read_line, wants_stream

LIMIT = 10_000


def check(path: Path, data: bytes) -> tuple[int, list[tuple[int | None, str]]]:
    source = path / "in"
    source.write_bytes(data)
    total, faults = check_input(source, CHAT, LIMIT)
    return total, [(fault.line, fault.code) for fault in faults]


def test_a_right_file_has_no_faults(tmp_path: Path) -> None:
    assert check(tmp_path, lines(3)) == (3, [])
    assert check(tmp_path, lines(2).rstrip(b"\n")) == (2, [])
    assert check(tmp_path, b"\n\r\n" + lines(1).replace(b"\n", b"\r\n") + b"\n") == (1, [])


def test_a_byte_order_mark_of_utf_8_says_nothing_and_another_one_says_what_is_wrong(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    assert check(tmp_path, mark + lines(2)) == (2, [])
    assert check(tmp_path, mark + line(0) + mark + line(1) + mark + b"\n") == (2, [])  # joined files
    assert check(tmp_path, mark) == (0, [(None, "empty_file")])
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        total, faults = check(tmp_path, lines(20).decode().encode(encoding))
        assert (total, faults) == (1, [(1, "invalid_encoding")])
    source = tmp_path / "in"
    source.write_bytes(mark + lines(2))
    assert [number for number, _ in InputReader(source, CHAT, (), LIMIT).read(5)] == [1, 2]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"[]", "invalid_line"),
        (b"1", "invalid_line"),
        (b"{}", "invalid_line"),
        (b'{"custom_id": 1}', "invalid_line"),
        (b'{"custom_id": "\xff"}', "invalid_utf8"),
        (b'{"body": ' + b"[" * 5000, "invalid_json_line"),
        (line(0, custom_id=""), "invalid_custom_id"),
        (line(0, custom_id="x" * 600), "invalid_custom_id"),
        (line(0, method="GET"), "invalid_method"),
        (line(0, url="/v1/models"), "invalid_url"),
        (line(0, url="/v1/completions"), "invalid_url"),
        (line(0, body=[]), "invalid_body"),
        (line(0, body=None), "invalid_body"),
        (line(7), "duplicate_custom_id"),
        (line(0, body={"x": "y" * LIMIT}), "line_too_long"),
    ],
)
def test_each_fault_is_named_with_its_line(tmp_path: Path, text: bytes, code: str) -> None:
    data = line(7) + text.rstrip(b"\n") + b"\n" + line(8)
    assert check(tmp_path, data) == (3, [(2, code)])


def test_files_without_lines_and_with_too_many(tmp_path: Path) -> None:
    assert check(tmp_path, b"\n\n") == (0, [(None, "empty_file")])
    assert check(tmp_path, b"{}\n" * 60_000)[1] == [(number, "invalid_line") for number in range(1, 101)]
    assert check(tmp_path, lines(50_001))[1] == [(None, "too_many_lines")]


def test_a_line_of_ten_megabytes_is_not_read_into_memory(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_bytes(b'{"custom_id": "' + b"x" * 10_000_000 + b'"}\n' + line(1))
    assert next((number, len(text)) for number, text in input_lines(source, 100)) == (1, 101)
    assert check(tmp_path, source.read_bytes())[1] == [(1, "line_too_long")]


def test_the_reader_leaves_out_what_was_answered(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_bytes(lines(7))
    reader = InputReader(source, CHAT, {"1", "5"}, LIMIT)
    found: list[int] = []
    while portion := reader.read(2):
        assert len(portion) <= 2
        found += [number for number, _ in portion]
    assert found == [1, 3, 4, 5, 7]


def test_a_portion_of_large_lines_ends_with_the_first_megabyte(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_bytes(b"".join(line(number, body={"text": "x" * 600_000}) for number in range(5)))
    reader = InputReader(source, CHAT, (), 10_000_000)
    assert [len(reader.read(8)) for _ in range(4)] == [2, 2, 1, 0]


def test_stream_is_found_in_a_body() -> None:
    for value, expected in ((True, True), (1, True), ("x", True), (False, False), (None, False)):
        body = {"stream": value, "stream_options": {}}
        assert wants_stream(read_line(line(0, body=body), (CHAT,))) == expected
    assert not wants_stream(read_line(line(0, body={}), (CHAT,)))


def test_an_error_of_a_line_quotes_little() -> None:
    with pytest.raises(LineError) as caught:
        read_line(line(0, method="M" * 100_000), (CHAT,))
    assert len(json.dumps(caught.value.message)) < 200

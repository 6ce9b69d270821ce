"""Fuzz targets: what tenants upload. Forms, the files in them, and the journals of answers after a crash."""

import json
import random
import tempfile
from pathlib import Path

from tests.fuzz.target import Target
from tiercel.server.batch.input import check_input
from tiercel.server.batch.journal import AnswerJournal
from tiercel.server.batch.upload_form import UploadForm
from tiercel.values.clock import MonotonicClock
from tiercel.values.errors import AdmissionError

_CHAT = "/v1/chat/completions"
_FORM = (
    b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\ncontent-disposition: form-data;'
    b' name="file"; filename="a.jsonl"\r\ncontent-type: text/plain\r\n\r\n{"a": 1}\n\r\n--x--\r\n'
)
_LINES = b"".join(
    json.dumps({"custom_id": str(number), "method": "POST", "url": _CHAT, "body": {"n": number}}).encode() + b"\n"
    for number in range(3)
)
_ANSWERS = b"".join(json.dumps({"custom_id": str(number), "response": {}}).encode() + b"\n" for number in range(3))


def _parse_form(text: bytes, rng: random.Random) -> None:
    """Parse a form whole and split; both give the same, or both refuse it."""
    splits = [[len(text)], [*sorted(rng.randrange(len(text) + 1) for _ in range(8)), len(text)]]
    found: list[tuple[bytes, str, dict[str, str]] | int] = []
    for ends in splits:
        form, data, start = UploadForm("multipart/form-data; boundary=x"), b"", 0
        try:
            for end in ends:
                data += form.feed(text[start:end])
                start = end
            found.append((data, form.finish(), form.fields))
        except AdmissionError as exc:
            found.append(exc.status)
    assert found[0] == found[1], f"{splits[1]}: {found}"


def _check_input(text: bytes, _rng: random.Random) -> None:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(text)
        total, faults = check_input(Path(file.name), _CHAT, 1000)
    assert total or faults


def _open_journal(text: bytes, _rng: random.Random) -> None:
    """Open a journal twice: the second time nothing is cut off any more."""
    with tempfile.NamedTemporaryFile() as file:
        path = Path(file.name)
        path.write_bytes(text)
        found: list[list[str]] = []
        for _ in range(2):
            journal = AnswerJournal(path, MonotonicClock())
            journal.open()
            found.append(list(journal.answered))
            assert path.stat().st_size == journal.size_bytes
            journal.close()
        assert found[0] == found[1]


TARGETS = (
    Target("upload_form", (_FORM,), _parse_form),
    Target("batch_input", (_LINES, b"", b"\n"), _check_input),
    Target("answer_journal", (_ANSWERS, b""), _open_journal),
)

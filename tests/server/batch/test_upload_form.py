"""The parser of uploads: the same for any split of the body, and a refusal for every hostile one."""

import random

import pytest

from tests.seeds import fresh_seeds
from tiercel.server.batch.upload_form import UploadForm
from tiercel.values.errors import AdmissionError

TYPE = "multipart/form-data; boundary=xyz"


def form(*parts: bytes, end: bytes = b"--xyz--\r\n") -> bytes:
    return b"".join(b"--xyz\r\n" + part + b"\r\n" for part in parts) + end


def field(name: str, value: bytes) -> bytes:
    return f'Content-Disposition: form-data; name="{name}"\r\n\r\n'.encode() + value


def file(data: bytes, name: str = "in.jsonl") -> bytes:
    head = f'Content-Disposition: form-data; name="file"; filename="{name}"\r\nContent-Type: text/plain\r\n\r\n'
    return head.encode() + data


def parse(body: bytes, *, pieces: list[int] | None = None) -> tuple[bytes, dict[str, str], str]:
    parser, data, start = UploadForm(TYPE), b"", 0
    for end in [*(pieces or []), len(body)]:
        data += parser.feed(body[start:end])
        start = end
    return data, parser.fields, parser.finish()


@pytest.mark.parametrize("seed", [1, *fresh_seeds(1)])
def test_any_split_of_the_body_gives_the_same(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        letters = b"ab\r\n-xyz\x00\xff"
        data = bytes(rng.choice(letters) for _ in range(rng.randrange(200))).replace(b"\r\n--xyz", b"")
        body = form(field("purpose", b"batch"), file(data), field("expires_after[seconds]", b"3600"))
        pieces = sorted(rng.randrange(len(body)) for _ in range(rng.randrange(20)))
        fields = {"purpose": "batch", "expires_after[seconds]": "3600"}
        assert parse(body, pieces=pieces) == (data, fields, "in.jsonl"), f"seed {seed}: {pieces} {body!r}"


def test_a_file_name_is_no_path() -> None:
    assert parse(form(file(b"", "../../etc/pass\twd")))[2] == ".._.._etc_pass_wd"
    assert parse(form(file(b"", "")))[2] == "file.jsonl"
    assert len(parse(form(file(b"", "x" * 3000)))[2]) == 255


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        form(file(b"abc"), end=b""),  # torn
        form(field("purpose", b"batch")),  # no file
        form(file(b"a"), file(b"b")),
        form(field("purpose", b"x" * 2000), file(b"a")),
        form(*(field(f"f{number}", b"") for number in range(20)), file(b"a")),
        form(b"no headers"),
        form(b"Content-Disposition: attachment; name=file\r\n\r\nx"),
        form(b"Content-Disposition: form-data\r\n\r\nx"),
        form(b"X: " + b"y" * 10_000 + b"\r\n\r\nx"),
        form(b"".join(b"X%d: y\r\n" % number for number in range(50)) + b"\r\nx"),
        form(b'Content-Disposition: form-data; name="file"\r\nContent-Transfer-Encoding: base64\r\n\r\neA=='),
        b"--abc\r\n" + file(b"x") + b"\r\n--abc--\r\n",
    ],
)
def test_a_form_that_is_wrong_is_refused(body: bytes) -> None:
    with pytest.raises(AdmissionError) as caught:
        parse(body)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "content_type", ["", "application/json", "multipart/form-data", "multipart/form-data; boundary=" + "x" * 3000]
)
def test_only_a_form_with_a_boundary_is_accepted(content_type: str) -> None:
    with pytest.raises(AdmissionError):
        UploadForm(content_type)

"""The body of an upload (multipart/form-data), parsed piece by piece: the file is never in memory as a whole."""

import re

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from tiercel.values.errors import AdmissionError

FORM_BYTES = 64 * 1024  # of an upload besides the file
_MAX_PARTS = 16
_MAX_HEADERS = 8  # of a part
_MAX_HEADER_BYTES = 4096
_MAX_FIELD_BYTES = 1024
_MAX_NAME = 255  # characters of a file name
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f/\\]")


class UploadForm:
    """The fields of a form with one file, whose bytes `feed` returns as they arrive.

    Fields besides the file are short. Unknown fields are ignored.
    """

    def __init__(self, content_type: str) -> None:
        """Errors: AdmissionError (400) if the content type is no form with a file."""
        media_type, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if media_type != b"multipart/form-data" or not boundary:
            raise AdmissionError(
                400,
                "Unsupported Media Type: a file is uploaded as multipart/form-data with a boundary",
                code="invalid_form",
            )
        self.fields: dict[str, str] = {}
        self.filename: str | None = None  # None until the file has begun
        self._is_over = False
        self._num_parts = 0
        self._headers: dict[bytes, bytes] = {}
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._field: str | None = None  # of the current part; None for the file
        self._value = bytearray()
        self._pieces: list[bytes] = []
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._add_header_name,
                    "on_header_value": self._add_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._add_data,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
                max_header_count=_MAX_HEADERS,
                max_header_size=_MAX_HEADER_BYTES,
            )
        except FormParserError as exc:
            raise _malformed() from exc

    def feed(self, data: bytes) -> bytes:
        """Parse the next piece of the body, and return the bytes of the file in it. Errors: AdmissionError (400)."""
        try:
            self._parser.write(data)
        except FormParserError as exc:
            raise _malformed() from exc
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def finish(self) -> str:
        """Return the name of the file at the end of the body. Errors: AdmissionError (400) if the form is not whole."""
        if not self._is_over:
            raise _malformed()
        if self.filename is None:
            raise AdmissionError(400, "file: the form has no part with this name", code="missing_field", param="file")
        return self.filename

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise AdmissionError(400, f"The form has more than {_MAX_PARTS} parts.", code="invalid_form")
        self._headers = {}

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        self._headers[bytes(self._header_name).lower()] = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _end_headers(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b"").decode("latin-1"))
        if kind != b"form-data" or b"name" not in options:
            raise _malformed()
        if self._headers.get(b"content-transfer-encoding", b"binary").lower() not in (b"binary", b"8bit", b"7bit"):
            raise AdmissionError(400, "Content-Transfer-Encoding is not supported in a form.", code="invalid_form")
        name = options[b"name"].decode("utf-8", "replace")
        self._field = None if name == "file" else name
        self._value.clear()
        if self._field is not None:
            return
        if self.filename is not None:
            raise AdmissionError(400, "file: expected one file", code="invalid_form", param="file")
        shown = _UNPRINTABLE.sub("_", options.get(b"filename", b"").decode("utf-8", "replace"))
        self.filename = shown[:_MAX_NAME] or "file.jsonl"

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._pieces.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _MAX_FIELD_BYTES:
            raise AdmissionError(
                400, f"A field of the form is longer than {_MAX_FIELD_BYTES} bytes.", code="invalid_form"
            )

    def _end_part(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._is_over = True


def _malformed() -> AdmissionError:
    return AdmissionError(400, "The body is not a complete multipart/form-data form.", code="invalid_form")

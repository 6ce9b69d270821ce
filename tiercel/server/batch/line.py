"""The lines of OpenAI's batch format: requests in the input, answers in the output."""

import secrets
from collections.abc import Collection

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from tiercel.server.batch.records import BatchFault
from tiercel.server.http.byte_order import UTF8_MARK, wide_encoding

BATCH_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""The paths that a line may name, if the server has them."""
WIDE_ENCODING = "invalid_encoding"
"""The code of a line in UTF-16 or UTF-32: so are all lines of the file."""
MAX_CUSTOM_ID = 512  # characters
MAX_LINES = 50_000  # of a batch; OpenAI's limit
_SHOWN = 64  # characters of what a client wrote, in a message


class LineError(Exception):
    """A line of the input is wrong."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    def fault(self, line: int) -> BatchFault:
        """Return the fault of the line with this number."""
        return BatchFault(code=self.code, message=self.message, param=self.param, line=line)


class BatchLine(Struct, frozen=True):
    """One request of a batch."""

    custom_id: str
    method: str
    url: str
    body: Raw  # a JSON object; the route checks its fields


class _StreamField(Struct, frozen=True):
    stream: object = None


class LineResponse(Struct, frozen=True):
    """The answer of a route. `ignored_fields` is its header of that name, left out without one."""

    status_code: int
    request_id: str
    body: Raw
    ignored_fields: str | UnsetType = UNSET


class LineFault(Struct, frozen=True):
    """The reason why a request has no answer."""

    code: str
    message: str


class LineAnswer(Struct, frozen=True):
    """One line of the output."""

    id: str
    custom_id: str | None  # None only if the line could not be read, in the output of `tiercel run-batch`
    response: LineResponse | None = None
    error: LineFault | None = None

    @property
    def is_success(self) -> bool:
        """Whether the route has answered with 200."""
        return self.response is not None and self.response.status_code == 200

    def encode(self) -> bytes:
        """Return the line with its end."""
        return msgspec.json.encode(self) + b"\n"


class _AnsweredLine(Struct, frozen=True):
    """The part of a line of the output that is read again."""

    custom_id: str


_LINE = msgspec.json.Decoder(BatchLine)
_STREAM = msgspec.json.Decoder(_StreamField)
_ANSWERED = msgspec.json.Decoder(_AnsweredLine)


def read_line(text: bytes, endpoints: Collection[str]) -> BatchLine:
    """Return the request of a line whose url is one of `endpoints`. Errors: LineError.

    A byte order mark of UTF-8 is left out: files with one may have been joined.
    """
    if (encoding := wide_encoding(text)) is not None:
        raise LineError(WIDE_ENCODING, f"The line is {encoding}; the file must be UTF-8.")
    text = text.removeprefix(UTF8_MARK)
    try:
        text.decode()
    except UnicodeDecodeError as exc:
        raise LineError("invalid_utf8", "The line is not valid UTF-8.") from exc
    try:
        line = _LINE.decode(text)
    except msgspec.ValidationError as exc:
        raise LineError(
            "invalid_line",
            "The line is not an object with the texts custom_id, method and url, and with a body.",
        ) from exc
    except (msgspec.DecodeError, RecursionError) as exc:
        raise LineError("invalid_json_line", "The line is not valid JSON.") from exc
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID:
        raise LineError("invalid_custom_id", f"custom_id: expected 1 to {MAX_CUSTOM_ID} characters.", "custom_id")
    if line.method != "POST":
        raise LineError("invalid_method", f"method: expected POST, not {line.method[:_SHOWN]!r}.", "method")
    if line.url not in endpoints:
        expected = " or ".join(sorted(endpoints))
        raise LineError("invalid_url", f"url: expected {expected}, not {line.url[:_SHOWN]!r}.", "url")
    if not bytes(line.body).startswith(b"{"):
        raise LineError("invalid_body", "body: expected a JSON object.", "body")
    return line


def wants_stream(line: BatchLine) -> bool:
    """Return whether the body asks for a stream, which no line of an output can hold."""
    try:
        stream = _STREAM.decode(line.body).stream
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # the route refuses the body
    return stream is not None and stream is not False


def read_answered_id(text: bytes) -> str | None:
    """Return the custom_id of a line of the output; None if the line is damaged."""
    try:
        return _ANSWERED.decode(text).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def stream_refusal(line: BatchLine, request_id: str) -> LineAnswer:
    """Return the answer to a request whose body has `stream`."""
    message = "stream is not supported in a batch: the answer of a line is one object"
    error = {"message": message, "type": "invalid_request_error", "param": "stream", "code": "unsupported_parameter"}
    return answer_of(line, LineResponse(400, request_id, Raw(msgspec.json.encode({"error": error}))))


def answer_of(line: BatchLine, response: LineResponse) -> LineAnswer:
    """Return the line of the output for an answer."""
    return LineAnswer(_answer_id(), line.custom_id, response)


def unanswered(line: BatchLine, code: str, message: str) -> LineAnswer:
    """Return the line of the output for a request without an answer."""
    return LineAnswer(_answer_id(), line.custom_id, None, LineFault(code, message))


def one_line(body: bytes) -> Raw:
    """Return a JSON document without line ends, which outside its strings are white space."""
    return Raw(body.replace(b"\n", b" ").replace(b"\r", b" ")) if b"\n" in body or b"\r" in body else Raw(body)


def _answer_id() -> str:
    return f"batch_req_{secrets.token_hex(16)}"

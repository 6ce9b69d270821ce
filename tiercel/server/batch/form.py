"""The two APIs whose requests batches hold, and the lines of their output."""

from typing import Protocol

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from tiercel.server.batch.line import BatchLine, LineResponse, answer_of, one_line, stream_refusal, unanswered
from tiercel.server.batch.records import MESSAGES_ENDPOINT, BatchStatus, Endpoint
from tiercel.server.batch.route_call import RouteAnswer

_NO_OBJECT = "The answer of the route is not one JSON object."
_FAILED = "The batch failed before this request was answered: the disk of the server failed, or its files were damaged."


class OutputLine(Protocol):
    """One line of the output."""

    @property
    def is_success(self) -> bool:
        """Whether the route has answered with 200."""
        ...

    def encode(self) -> bytes:
        """Return the line with its end."""
        ...


class BatchForm(Protocol):
    """The output of the batches of one API.

    `answers_all`: every request has a line in the output, also if the batch ends before the request was answered; then
    these lines are written at the end by `left`. Otherwise, only an expired batch has lines of requests without an
    answer.
    """

    answers_all: bool

    def answer(self, line: BatchLine, answer: RouteAnswer, request_id: str) -> OutputLine:
        """Return the line for the answer of a route."""
        ...

    def streamed(self, line: BatchLine, request_id: str) -> OutputLine:
        """Return the line for a request that asks for a stream."""
        ...

    def expired(self, line: BatchLine) -> OutputLine | None:
        """Return the line for a request that was not answered within the window of the batch; None if `left` does."""
        ...

    def left(self, custom_id: str, status: BatchStatus) -> OutputLine:
        """Return the line for a request without an answer, in a batch that gets this status."""
        ...


class _OpenAIForm:
    """The output of /v1/batches."""

    answers_all = False

    def answer(self, line: BatchLine, answer: RouteAnswer, request_id: str) -> OutputLine:
        if not answer.is_json or not answer.body:
            return unanswered(line, "invalid_answer", _NO_OBJECT)
        ignored = answer.ignored_fields or UNSET
        return answer_of(line, LineResponse(answer.status, request_id, one_line(answer.body), ignored))

    def streamed(self, line: BatchLine, request_id: str) -> OutputLine:
        return stream_refusal(line, request_id)

    def expired(self, line: BatchLine) -> OutputLine | None:
        return unanswered(
            line, "batch_expired", "The request was not answered within the completion window of the batch."
        )

    def left(self, custom_id: str, status: BatchStatus) -> OutputLine:
        raise AssertionError("lines without an answer are left out of this output")


class MessageResult(Struct, frozen=True, tag_field="type"):
    """The result of a request to /v1/messages."""


class Succeeded(MessageResult, frozen=True, tag="succeeded"):
    """The request was answered."""

    message: Raw


class Errored(MessageResult, frozen=True, tag="errored"):
    """The request was refused, or failed."""

    error: Raw  # the body of the refusal


class Canceled(MessageResult, frozen=True, tag="canceled"):
    """The batch was cancelled before the request was answered."""


class Expired(MessageResult, frozen=True, tag="expired"):
    """The batch expired before the request was answered."""


class MessageLine(Struct, frozen=True):
    """One line of the results of a message batch. `ignored_fields` is our own, as in `LineResponse`."""

    custom_id: str
    result: Succeeded | Errored | Canceled | Expired
    ignored_fields: str | UnsetType = UNSET

    @property
    def is_success(self) -> bool:
        """Whether there is a message."""
        return isinstance(self.result, Succeeded)

    def encode(self) -> bytes:
        """Return the line with its end."""
        return msgspec.json.encode(self) + b"\n"


class _MessageForm:
    """The output of /v1/messages/batches."""

    answers_all = True

    def answer(self, line: BatchLine, answer: RouteAnswer, request_id: str) -> OutputLine:
        if not answer.is_json or not answer.body:
            return MessageLine(line.custom_id, _failure("api_error", _NO_OBJECT, request_id))
        body = one_line(answer.body)
        result = Succeeded(body) if answer.status == 200 else Errored(body)
        return MessageLine(line.custom_id, result, answer.ignored_fields or UNSET)

    def streamed(self, line: BatchLine, request_id: str) -> OutputLine:
        message = "stream is not supported in a batch: the result of a request is one object"
        return MessageLine(line.custom_id, _failure("invalid_request_error", message, request_id))

    def expired(self, line: BatchLine) -> OutputLine | None:
        return None

    def left(self, custom_id: str, status: BatchStatus) -> OutputLine:
        if status == "cancelled":
            return MessageLine(custom_id, Canceled())
        if status == "expired":
            return MessageLine(custom_id, Expired())
        return MessageLine(custom_id, _failure("api_error", _FAILED, None))


def _failure(kind: str, message: str, request_id: str | None) -> Errored:
    body = {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
    return Errored(Raw(msgspec.json.encode(body)))


_OPENAI, _MESSAGES = _OpenAIForm(), _MessageForm()


def form_of(endpoint: Endpoint) -> BatchForm:
    """Return the form of the output of a batch."""
    return _MESSAGES if endpoint == MESSAGES_ENDPOINT else _OPENAI

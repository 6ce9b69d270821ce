"""A conversation over the OpenAI API of a server."""

import json
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from tiercel.system.server_url import read_server_url
from tiercel.system.wait_notice import WaitNotice

_CONNECT_S = 10.0
_ANSWER_S = 600.0  # maximum time between two pieces of an answer; a long prompt may wait in the queue


class ChatError(Exception):
    """A missing or wrong response of the server. The message is one line for the user."""


class ChatConversation:
    """The messages of a conversation, and the HTTP client that sends them. Use with `with`."""

    def __init__(self, url: str, api_key: str | None, system: str | None, sampling: Mapping[str, float | None]) -> None:
        """`url`: with or without /v1. Errors: ConfigError if it can be no address of a server."""
        self.url = read_server_url(url, "--url")
        self.model = ""
        self._sampling = {name: value for name, value in sampling.items() if value is not None}
        self._messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(_CONNECT_S, read=_ANSWER_S))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def choose_model(self, name: str) -> None:
        """Choose a model by name, or for `auto` the first one that the server reports. Errors: ChatError."""
        if name != "auto":
            self.model = name
            return
        try:
            with WaitNotice(f"an answer of {self.url}"):
                response = self._client.get(f"{self.url}/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as exc:
            raise ChatError(_unreachable(self.url, exc)) from exc
        if response.is_error:
            raise ChatError(_error_line(response))
        try:
            self.model = response.json()["data"][0]["id"]
        except (ValueError, LookupError, TypeError) as exc:
            raise ChatError(f"{self.url} does not respond like an OpenAI API") from exc

    def ask(self, question: str) -> Iterator[str]:
        """Yield the answer piece by piece. The received pieces stay in the conversation, also
        if the caller stops early.

        Errors: ChatError.
        """
        body = {"model": self.model, "messages": [*self._messages, _message("user", question)], "stream": True}
        answer, address = "", f"{self.url}/v1/chat/completions"
        try:
            with (
                WaitNotice(f"the first token from {self.url}") as notice,
                self._client.stream("POST", address, json=body | self._sampling) as response,
            ):
                if response.is_error:
                    response.read()
                    raise ChatError(_error_line(response))
                for piece in _pieces(response.iter_lines()):
                    notice.end()
                    answer += piece
                    yield piece
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as exc:
            raise ChatError(_unreachable(self.url, exc)) from exc
        finally:
            if answer:
                self._messages += [_message("user", question), _message("assistant", answer)]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    """Yield the text of server-sent events. Errors: ChatError for an error event."""
    for line in lines:
        content = line.removeprefix("data:").strip()
        if not line.startswith("data:") or content == "[DONE]":
            continue
        try:
            event: Any = json.loads(content)  # any server's JSON
            if "error" in event:
                raise ChatError(str(event["error"]["message"]))
            pieces = [choice["delta"].get("content") for choice in event["choices"]]
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            raise ChatError("the server sent an event that does not follow the OpenAI API") from exc
        yield from (str(piece) for piece in pieces if piece)


def _error_line(response: httpx.Response) -> str:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = response.reason_phrase
    return f"{response.status_code}: {message}"


def _unreachable(url: str, error: Exception) -> str:
    if isinstance(error, httpx.ConnectError):
        return f"cannot reach {url}: is `tiercel serve` running there? ({error})"
    return f"{url}: {error or type(error).__name__}"

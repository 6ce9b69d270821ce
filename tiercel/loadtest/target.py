"""Calls to the server under test beside the load: readiness, model, version and token counts."""

import asyncio
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import httpx

from tiercel.loadtest.client.sender import tls_context
from tiercel.loadtest.client.sse import error_message
from tiercel.loadtest.load.tokens import FolderCounter, ServerCounter, TokenCounter, estimate
from tiercel.loadtest.settings import BenchSettings
from tiercel.system.wait_notice import WaitNotice
from tiercel.values.clock import Clock
from tiercel.values.errors import ConfigError, TiercelError

_CALL_S = 60.0
_RETRY_S = 0.5
_SOON_S = 1.0  # after which a server without an answer is asked whether it speaks HTTP
_WORDS_BYTES = 40
_NO_HTTP = "the server there does not speak HTTP"
_WAITING = frozenset({425, 429, 500, 502, 503, 504})


class Target:
    """One server under test. Use with `async with`."""

    def __init__(self, settings: BenchSettings, headers: Mapping[str, str], clock: Clock) -> None:
        self._settings = settings
        self._headers = dict(headers)
        self._clock = clock
        verify = tls_context(verify=not settings.insecure)
        self._plain = httpx.Client(headers=self._headers, timeout=_CALL_S, trust_env=False, verify=verify)
        self.client = httpx.AsyncClient(
            base_url=settings.root_url, headers=self._headers, timeout=_CALL_S, trust_env=False, verify=verify
        )

    async def __aenter__(self) -> "Target":
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._plain.close()
        await self.client.aclose()

    async def model(self) -> str:
        """Return the model name to send: --served-model-name, --model, or the first that the server reports."""
        given = self._settings.served_model_name or self._settings.model
        if given is not None:
            return given
        answer = await self._patiently("GET", "/v1/models", None)
        try:
            return str(answer.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as exc:
            raise ConfigError("bench.model", f"{self._settings.root_url} lists no model: give --model") from exc

    async def wait_ready(self, body: Mapping[str, object]) -> None:
        """Wait until the server has answered a small request. Errors: TiercelError if it refuses or does not answer."""
        if self._settings.ready_check_timeout_sec > 0:
            await self._patiently("POST", self._settings.path, body)

    async def server_version(self) -> str | None:
        """Return the version that /version reports, or None."""
        try:
            answer = await self.client.get("/version")
            return str(answer.json()["version"]) if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return None

    async def post(self, path: str) -> None:
        """Post to an endpoint. Errors: ConfigError if that fails."""
        try:
            (await self.client.post(path)).raise_for_status()
        except httpx.HTTPError as exc:
            raise ConfigError("bench.call", f"{path}: {exc}") from exc

    async def counter(self, model: str, body: Mapping[str, object]) -> TokenCounter:
        """Return the best token counter: the tokenizer folder, the server's /tokenize, or an estimate.

        Errors: ConfigError.
        """
        if self._settings.tokenizer is not None:
            return FolderCounter(Path(self._settings.tokenizer))
        by_server = ServerCounter(self._plain, f"{self._settings.root_url}/tokenize", model)
        with suppress(ConfigError):  # the server has no /tokenize
            await asyncio.to_thread(by_server.count, "hello")
            return by_server

        def prompt_tokens(text: str) -> int | None:
            return self._usage_of(body, text)

        return await asyncio.to_thread(estimate, prompt_tokens)

    def _usage_of(self, body: Mapping[str, object], text: str) -> int | None:
        field = {"messages": [{"role": "user", "content": text}]} if self._settings.is_chat else {"prompt": text}
        try:
            answer = self._plain.post(f"{self._settings.root_url}{self._settings.path}", json={**body, **field})
            return int(answer.json()["usage"]["prompt_tokens"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return None

    async def _patiently(self, method: str, path: str, body: Mapping[str, object] | None) -> httpx.Response:
        """Repeat a call until it succeeds, while the server may still be starting, and say every 5 s what it waits for.

        Errors: ConfigError at once if the address can never work; TiercelError if the server refuses the call, or time
        is up.
        """
        address, patience_s = f"{self._settings.root_url}{path}", self._settings.ready_check_timeout_sec
        end_s = self._clock.now_s() + patience_s
        with WaitNotice(f"{address}, for up to {patience_s:g} s") as notice:
            while True:
                try:
                    answer = await self._call(method, path, body)
                except (httpx.TransportError, httpx.InvalidURL, UnicodeError) as exc:
                    if (fault := address_fault(exc)) is not None:
                        raise ConfigError("bench.url", f"{self._settings.root_url}: {fault}") from exc
                    reason = str(exc) or type(exc).__name__
                else:
                    if answer.is_success:
                        return answer
                    reason = f"HTTP {answer.status_code}: {error_message(answer.content)}"
                    if answer.status_code not in _WAITING:
                        raise TiercelError("bench.refused", f"{address}: {reason}")
                if self._clock.now_s() >= end_s:
                    raise TiercelError("bench.not_ready", f"{address}: {reason}")
                notice.words = f"{address}, for up to {patience_s:g} s; last: {reason}"
                await asyncio.sleep(_RETRY_S)

    async def _call(self, method: str, path: str, body: Mapping[str, object] | None) -> httpx.Response:
        """Call the server. Errors: ConfigError if it does not answer soon, and what it says is no HTTP."""
        calling = asyncio.create_task(self.client.request(method, path, json=body))
        try:
            await asyncio.wait([calling], timeout=_SOON_S)
            if not calling.done() and (said := await _said(httpx.URL(self._settings.root_url))) is not None:
                raise ConfigError("bench.url", f"{self._settings.root_url}: {_NO_HTTP}: {said}")
            return await calling
        finally:
            calling.cancel()


async def _said(url: httpx.URL) -> str | None:
    """Return the first words of a server that does not speak HTTP; None if it speaks HTTP, TLS, or says nothing.

    The HTTP client would wait for the end of what it takes for the head of an answer.
    """
    if url.scheme != "http":
        return None
    writer = None
    try:
        async with asyncio.timeout(_SOON_S):
            reader, writer = await asyncio.open_connection(url.host, url.port or 80)
            writer.write(f"HEAD / HTTP/1.1\r\nHost: {url.host}\r\nConnection: close\r\n\r\n".encode())
            start = await reader.read(_WORDS_BYTES)
    except (OSError, TimeoutError):
        return None
    finally:
        if writer is not None:
            writer.close()
    return None if b"HTTP/".startswith(start[:5]) else repr(start.decode("latin-1").strip())


def address_fault(error: Exception) -> str | None:
    """Return why no server will ever answer at an address, as an error of httpx tells it; None if one may yet."""
    if isinstance(error, httpx.InvalidURL | httpx.LocalProtocolError | UnicodeError):
        return str(error)
    if isinstance(error, httpx.RemoteProtocolError) and "disconnected" not in str(error):
        return f"{_NO_HTTP}: {error}"
    cause: BaseException | None = error
    while cause is not None:
        # Containers and pods are often started before the resolver of their network answers.
        if isinstance(cause, socket.gaierror) and cause.errno != socket.EAI_AGAIN:
            return f"the name of the host cannot be resolved: {cause.strerror}"
        if isinstance(cause, ssl.SSLError):
            return f"no TLS connection: {cause.reason or cause}"
        cause = cause.__cause__ or cause.__context__
    return None

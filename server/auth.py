"""Keys: who may use the routes that are not open."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.requests import Request

from tiercel.errors import AdmissionError
from tiercel.exposure import is_loopback


class KeyRing:
    """The operator's API keys, kept as SHA-256 digests. Without keys everybody may in."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    @property
    def is_open(self) -> bool:
        """True when no key is needed."""
        return not self._digests

    def admits(self, authorization: str | None) -> bool:
        """Check an Authorization header. Every key is compared, each in constant time."""
        if self.is_open:
            return True
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


class Guard:
    """Route dependency of everything that is not open."""

    def __init__(self, keys: KeyRing, *, local_is_open: bool = False) -> None:
        self._keys = keys
        self._local_is_open = local_is_open

    async def __call__(self, request: Request) -> None:
        """Errors: AdmissionError (401)."""
        if self._local_is_open and is_local(request):
            return
        if not self._keys.admits(request.headers.get("authorization")):
            raise AdmissionError(
                401, "Incorrect API key provided.", code="invalid_api_key", kind="authentication_error"
            )


def is_local(request: Request) -> bool:
    """True when the peer is this machine: loopback, or a Unix socket."""
    if request.client is None or not request.client.host:
        return True
    return is_loopback(request.client.host)

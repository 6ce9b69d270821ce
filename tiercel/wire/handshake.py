"""The handshake with which a front and the host of an engine prove to each other that they know the same secret.

The host speaks first: it sends a challenge with a fresh nonce. The front answers with its Hello, which contains a nonce
of its own and an HMAC over both nonces, so that a recorded Hello is worthless on another connection. The host answers
with a verdict, and with an HMAC of its own if the Hello is accepted. All three have a fixed length, and their first
bytes never change, so that versions that differ are told apart from garbage. Nothing here does I/O.
"""

import enum
import hmac
import struct
import sys

from msgspec import Struct

from tiercel.values.errors import ConfigError, WireError

VERSION = 2
NONCE_BYTES = 16
IDENTITY_BYTES = 16
MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096

_MAGIC = b"tiercel\0"
_PROOF_BYTES = 32  # SHA-256
_CHALLENGE = struct.Struct(f"<8sI{NONCE_BYTES}s")
_HELLO = struct.Struct(f"<8sI{IDENTITY_BYTES}s{NONCE_BYTES}s{_PROOF_BYTES}s")
_VERDICT = struct.Struct(f"<8sIB{_PROOF_BYTES}s")
_NO_PROOF = bytes(_PROOF_BYTES)

CHALLENGE_BYTES = _CHALLENGE.size
HELLO_BYTES = _HELLO.size
VERDICT_BYTES = _VERDICT.size


class HelloVerdict(enum.Enum):
    """The host's answer to a Hello."""

    ACCEPTED = 0
    WRONG_VERSION = 1
    WRONG_SECRET = 2
    FULL = 3  # it serves as many fronts as it may


_REASONS = {
    HelloVerdict.WRONG_SECRET: "the secrets differ: give both sides the same --engine-secret-file",
    HelloVerdict.FULL: "the engine serves as many fronts as it may",
}


class HelloResult(Struct, frozen=True):
    """The host's answer to a Hello. `reply` is to be sent; then the connection ends unless it is accepted."""

    verdict: HelloVerdict
    reply: bytes
    front: bytes = b""  # the identity of the front


class HostHandshake:
    """The host's side, for one connection. `nonce` must be fresh and random."""

    def __init__(self, secret: bytes, nonce: bytes) -> None:
        self._secret = secret
        self._nonce = nonce

    @property
    def challenge(self) -> bytes:
        """The bytes to send first."""
        return _CHALLENGE.pack(_MAGIC, VERSION, self._nonce)

    def judge(self, hello: bytes, *, is_full: bool = False) -> HelloResult:
        """Check a Hello of HELLO_BYTES. Errors: WireError if it is not one at all."""
        magic, version, front, nonce, proof = _HELLO.unpack(hello)
        if magic != _MAGIC:
            raise WireError("wire.not_a_hello")
        if version != VERSION:
            return self._refuse(HelloVerdict.WRONG_VERSION)
        if not hmac.compare_digest(proof, _prove(self._secret, b"front", self._nonce, nonce, front)):
            return self._refuse(HelloVerdict.WRONG_SECRET)
        if is_full:
            return self._refuse(HelloVerdict.FULL)
        own = _prove(self._secret, b"host", self._nonce, nonce, front)
        return HelloResult(
            HelloVerdict.ACCEPTED, _VERDICT.pack(_MAGIC, VERSION, HelloVerdict.ACCEPTED.value, own), front
        )

    def _refuse(self, verdict: HelloVerdict) -> HelloResult:
        return HelloResult(verdict, _VERDICT.pack(_MAGIC, VERSION, verdict.value, _NO_PROOF))


class FrontHandshake:
    """The front's side, for one connection. `nonce` must be fresh and random; `identity` is that of the process."""

    def __init__(self, secret: bytes, identity: bytes, nonce: bytes) -> None:
        self._secret = secret
        self._identity = identity
        self._nonce = nonce
        self._host_nonce = b""

    def answer(self, challenge: bytes) -> bytes:
        """Return the Hello for a challenge of CHALLENGE_BYTES. Errors: WireError."""
        magic, version, self._host_nonce = _CHALLENGE.unpack(challenge)
        if magic != _MAGIC:
            raise WireError(
                "wire.not_an_engine", "this is no tiercel engine, or one of them uses TLS and the other not"
            )
        if version != VERSION:
            raise _version_error(version)
        proof = _prove(self._secret, b"front", self._host_nonce, self._nonce, self._identity)
        return _HELLO.pack(_MAGIC, VERSION, self._identity, self._nonce, proof)

    def check(self, verdict: bytes) -> None:
        """Check a verdict of VERDICT_BYTES. Errors: WireError with the reason of a refusal."""
        magic, version, code, proof = _VERDICT.unpack(verdict)
        if magic != _MAGIC or code not in {known.value for known in HelloVerdict}:
            raise WireError("wire.not_a_verdict", "the answer to the Hello is not one of a tiercel engine")
        found = HelloVerdict(code)
        if found is HelloVerdict.WRONG_VERSION:
            raise _version_error(version)
        if found is not HelloVerdict.ACCEPTED:
            raise WireError(f"wire.{found.name.lower()}", _REASONS[found])
        own = _prove(self._secret, b"host", self._host_nonce, self._nonce, self._identity)
        if not hmac.compare_digest(proof, own):
            raise WireError("wire.wrong_secret", "the engine does not know the secret of --engine-secret-file")


def check_byte_order() -> None:
    """Check that token ids of this machine are little-endian, as they travel. Errors: ConfigError."""
    if sys.byteorder != "little":
        raise ConfigError("wire.byte_order", "engines and fronts need a little-endian machine")


def _version_error(version: int) -> WireError:
    return WireError(
        "wire.version", f"the engine speaks version {version} of the wire, this front version {VERSION}: update one"
    )


def _prove(secret: bytes, role: bytes, host_nonce: bytes, front_nonce: bytes, identity: bytes) -> bytes:
    """Return the HMAC of one side. All parts but the role have fixed lengths."""
    version = VERSION.to_bytes(4, "little")
    return hmac.digest(secret, b"|".join((role, version + host_nonce + front_nonce + identity)), "sha256")

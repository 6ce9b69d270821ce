"""Transfer codings of request bodies: only `chunked`, once, in HTTP/1.1 (RFC 9112, sections 6.1 and 7).

The parser takes any list that ends in `chunked` for chunks of the plain body. A body of other codings would be read as
something that its sender did not mean, and a proxy in front may see other limits between requests.
"""

from collections.abc import Iterable

from tiercel.values.errors import AdmissionError

_NAME = b"transfer-encoding"
_CHUNKED = b"chunked"
_KNOWN = frozenset({b"gzip", b"x-gzip", b"deflate", b"compress", b"x-compress"})  # registered, and not implemented


def coding_fault(headers: Iterable[tuple[bytes, bytes]], http_version: str) -> AdmissionError | None:
    """Return why the transfer coding of a request cannot be served; None if it has none, or chunks."""
    lines = [value for name, value in headers if name == _NAME]
    if not lines:
        return None
    codings = [coding.strip(b" \t").lower() for coding in b",".join(lines).split(b",")]
    if http_version == "1.0":
        return _refusal(400, "is not part of HTTP/1.0")
    if codings == [_CHUNKED]:
        return None
    others = [coding for coding in codings if coding != _CHUNKED]
    if others and _KNOWN.issuperset(others) and codings[-1] == _CHUNKED and codings.count(_CHUNKED) == 1:
        return _refusal(501, "may be chunked only: the server decodes no other coding")
    return _refusal(400, "may be chunked only, given once")


def _refusal(status: int, text: str) -> AdmissionError:
    code = "unsupported_transfer_coding" if status == 501 else "invalid_http"
    return AdmissionError(status, f"Transfer-Encoding {text}.", code=code)

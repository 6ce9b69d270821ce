"""Fields that stand for more than their own bytes: what they expand to is limited as if it had been sent."""

from collections.abc import Sequence

import msgspec

from tiercel.values.errors import AdmissionError
from tiercel.values.request import SamplingParams

LISTED_TOKEN_BYTES = 36
"""Memory of a token in a list: its place and the number."""
_PACKED_TOKEN_BYTES = 4


def check_expansion(field: str, meaning: str, num_bytes: int, limit_bytes: int) -> None:
    """Refuse a field that stands for more bytes than a body may have. `meaning` is what it stands for.

    Errors: AdmissionError (413), with the code of a body that is too large.
    """
    if num_bytes > limit_bytes:
        raise AdmissionError(
            413,
            f"{field}: {meaning} would take {num_bytes} bytes; at most {limit_bytes} are allowed, as in a request body"
            " (--max-body-bytes).",
            code="request_too_large",
            param=field,
        )


def submitted_bytes(lengths: Sequence[int], params: SamplingParams, choices: int) -> int:
    """Return the bytes that the engine gets: for each choice the prompt, of these lengths in tokens, and `params`."""
    own = len(msgspec.msgpack.encode(params))
    return choices * sum(length * _PACKED_TOKEN_BYTES + own for length in lengths)


def check_submission(lengths: Sequence[int], params: SamplingParams, choices: int, limit_bytes: int) -> int:
    """Return the bytes that the engine gets of a request.

    Errors: AdmissionError (413) naming `n` if they are more than all waiting bodies may have.
    """
    size = submitted_bytes(lengths, params, choices)
    if size > limit_bytes:
        raise AdmissionError(
            413,
            f"n: {choices} choices of {len(lengths)} prompts with {sum(lengths)} tokens would take {size} bytes on"
            f" their way to the engine; at most {limit_bytes} are allowed (--max-pending-body-bytes). Please reduce n"
            " or the prompts.",
            code="request_too_large",
            param="n",
        )
    return size

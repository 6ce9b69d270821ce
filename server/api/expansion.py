"""Fields that stand for more than their own bytes: what they expand to is limited as if it had been sent."""

from tiercel.errors import AdmissionError


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

"""Refusals of the chat API in the words of the APIs that are served by it."""

import contextlib
import re
from collections.abc import Generator, Mapping

from tiercel.values.errors import AdmissionError


def renamed(refusal: AdmissionError, names: Mapping[str, str]) -> AdmissionError:
    """Return a refusal with the chat API's field, if `names` has it, as another API names it.

    Only the beginning of the message is ours for certain: what follows may quote the client.
    """
    field = refusal.param or ""
    name = names.get(field)
    if name is None:
        return refusal
    begins = re.match(rf"(The )?{re.escape(field)}(?![\w-])", refusal.message)
    message = refusal.message if begins is None else f"{begins[1] or ''}{name}{refusal.message[begins.end() :]}"
    return AdmissionError(
        refusal.status, message, code=refusal.code, kind=refusal.kind, param=name, retry_after_s=refusal.retry_after_s
    )


@contextlib.contextmanager
def renaming(names: Mapping[str, str]) -> Generator[None]:
    """Rename the chat API's fields in the refusals of a block."""
    try:
        yield
    except AdmissionError as exc:
        other = renamed(exc, names)
        if other is exc:
            raise
        raise other from exc

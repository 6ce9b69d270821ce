"""The settings of stored responses, chat completions and conversations. See `settings.py`."""

from functools import partial
from typing import Annotated

from tiercel.settings.batches import BatchSettings
from tiercel.settings.groups import ANSWERS
from tiercel.settings.option import SIZE, Option, read_size
from tiercel.values.units import GIB, MIB

_MAX_BYTES = 1024 * GIB
_MAX_LIFETIME_S = 30 * 86_400

_size = partial(
    Option, metavar="SIZE", read=read_size, expects=SIZE, is_rare=True, is_live=True, within=(MIB, _MAX_BYTES)
)


class ResponseSettings(BatchSettings, frozen=True, kw_only=True):
    """The limits of the responses, chat completions and conversations that are stored, in memory."""

    stored_responses: Annotated[
        int,
        Option(
            ANSWERS, "Maximum stored responses, chat completions and conversations of a tenant; 0: none.", "N",
            is_rare=True, within=(0, 1_000_000), is_live=True,
        ),
    ] = 1000  # beyond it, the least recently used one is forgotten  # fmt: skip
    stored_response_tenant_bytes: Annotated[
        int, _size(ANSWERS, "Maximum memory of the stored responses, chat completions and conversations of a tenant.")
    ] = 32 * MIB
    stored_response_bytes: Annotated[
        int, _size(ANSWERS, "Maximum memory of all stored responses, chat completions and conversations.")
    ] = 128 * MIB
    stored_response_lifetime_s: Annotated[
        float,
        Option(
            ANSWERS,
            "Time after its last use at which a stored response, chat completion or conversation is forgotten.",
            "SECONDS",
            name="stored_response_lifetime",
            is_rare=True,
            within=(1, _MAX_LIFETIME_S),
            is_live=True,
        ),
    ] = 86_400.0

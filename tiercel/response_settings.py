"""The settings of stored responses. See `tiercel.settings`."""

from functools import partial
from typing import Annotated

from tiercel.batch_settings import BatchSettings
from tiercel.option import SIZE, Option, read_size
from tiercel.setting_groups import ANSWERS
from tiercel.units import GIB, MIB

_MAX_BYTES = 1024 * GIB
_MAX_LIFETIME_S = 30 * 86_400

_size = partial(
    Option, metavar="SIZE", read=read_size, expects=SIZE, is_rare=True, is_live=True, within=(MIB, _MAX_BYTES)
)


class ResponseSettings(BatchSettings, frozen=True, kw_only=True):
    """The limits of the responses that /v1/responses stores, in memory."""

    stored_responses: Annotated[
        int,
        Option(
            ANSWERS, "Maximum stored responses of a tenant; 0: none.", "N", is_rare=True, within=(0, 1_000_000),
            is_live=True,
        ),
    ] = 1000  # beyond it, the least recently used one is forgotten  # fmt: skip
    stored_response_tenant_bytes: Annotated[
        int, _size(ANSWERS, "Maximum memory of the stored responses of a tenant.")
    ] = 32 * MIB
    stored_response_bytes: Annotated[int, _size(ANSWERS, "Maximum memory of all stored responses.")] = 128 * MIB
    stored_response_lifetime_s: Annotated[
        float,
        Option(
            ANSWERS,
            "Time after its last use at which a stored response is forgotten.",
            "SECONDS",
            name="stored_response_lifetime",
            is_rare=True,
            within=(1, _MAX_LIFETIME_S),
            is_live=True,
        ),
    ] = 86_400.0

"""The settings of engines and fronts that communicate over TCP. See `settings.py`."""

from functools import partial
from typing import Annotated

from tiercel.settings.access import AccessSettings
from tiercel.settings.groups import FLEET
from tiercel.settings.option import Option

_file = partial(Option, FLEET, metavar="FILE", is_rare=True)


class FleetSettings(AccessSettings, frozen=True, kw_only=True):
    """The engines that a front uses, and how both sides of the wire know each other."""

    engines: Annotated[
        str | None,
        Option(
            FLEET,
            "Engines of a front: static:HOST:PORT,... or dns:NAME[:PORT] or file:PATH; default: an own engine.",
            "LIST",
            is_rare=True,
        ),
    ] = None
    engine_secret_file: Annotated[
        str | None, _file(help="Secret that fronts and engines share, 16 bytes at least.")
    ] = None
    engine_certfile: Annotated[
        str | None, _file(help="TLS certificate of this side of the wire; needed off loopback.")
    ] = None
    engine_keyfile: Annotated[str | None, _file(help="TLS key of this side of the wire; needed off loopback.")] = None
    engine_cafile: Annotated[
        str | None, _file(help="CA that signs the certificate of the other side; needed off loopback.")
    ] = None

"""The settings of the control socket. See `settings.py`."""

from typing import Annotated

from tiercel.settings.fleet import FleetSettings
from tiercel.settings.groups import SERVER
from tiercel.settings.option import Option


class ControlSettings(FleetSettings, frozen=True, kw_only=True):
    """The control socket of the daemon, and what a new daemon asks of a running one over it."""

    control_socket: Annotated[
        str | None,
        Option(
            SERVER,
            "Unix socket for `tiercel drain` and --takeover; default: in the runtime folder, by port; empty: none.",
            "PATH",
            is_rare=True,
            may_be_empty=True,
        ),
    ] = None
    takeover: Annotated[
        bool, Option(SERVER, "Take over port and SSD tier of the running daemon once loaded.", is_rare=True)
    ] = False

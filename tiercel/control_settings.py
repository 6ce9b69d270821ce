"""The settings of the control socket. See `tiercel.settings`."""

from typing import Annotated

from tiercel.fleet_settings import FleetSettings
from tiercel.option import Option
from tiercel.setting_groups import SERVER


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

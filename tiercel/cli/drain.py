"""`tiercel drain`: tell a running daemon of this machine to drain and exit."""

from typing import Annotated

import typer
from msgspec.structs import replace

from tiercel.cli.console import fail
from tiercel.settings.settings import ServerSettings
from tiercel.system.wait_notice import WaitNotice

_PORT = 8000

Port = Annotated[int, typer.Option(help="Port that the daemon serves on.", min=1, max=65_535, metavar="N")]
Uds = Annotated[str | None, typer.Option(help="Unix socket that the daemon serves on, in place of a port.")]
ControlSocket = Annotated[str | None, typer.Option(help="Control socket, if the daemon was given one.", metavar="PATH")]
Wait = Annotated[bool, typer.Option("--wait", help="Return when the daemon has exited.")]


def drain(port: Port = _PORT, uds: Uds = None, control_socket: ControlSocket = None, wait: Wait = False) -> int:
    """Tell the daemon to drain and exit, as SIGTERM does.

    /ready answers 503 at once, and open streams finish within its
    --shutdown-timeout. The daemon must belong to the caller, or the caller
    is root.
    Exit code 0: it drains, or with --wait, it has exited; 1: there is no
    such daemon, or it has refused.
    """
    # lazy: no other verb needs the control socket
    from tiercel.server.control.address import control_path

    # lazy: as above
    from tiercel.server.control.caller import ControlCaller

    # lazy: as above
    from tiercel.server.control.messages import ControlError

    settings = ServerSettings(model="", served_model_names=(), uds=uds, control_socket=control_socket)
    path = control_path(replace(settings, port=port), port)
    if path is None:
        fail("--control-socket is empty: expected the path of a socket")
        return 2
    try:
        caller = ControlCaller.connect(path)
        if caller is None:
            fail(f"no daemon listens on {path}; give the --port, --uds or --control-socket of the daemon")
            return 1
        with caller:
            caller.drain()
            print(f"the daemon with pid {caller.pid} drains")
            if wait:
                with WaitNotice(f"the end of the daemon with pid {caller.pid}"):
                    caller.wait_gone()
                print("it has exited")
    except ControlError as exc:
        fail(f"{path}: {exc.message or exc}")
        return 1
    return 0

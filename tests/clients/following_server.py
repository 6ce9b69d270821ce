"""`tiercel serve` whose engine is the model of `following_model`: python -m tests.clients.following_server FLAGS.

The HTTP process, with the API, grammars, parsers, admission and streams, is the product's own.
"""

import argparse
import asyncio
import socket
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from tests.clients.following_model import END, FollowingModel
from tests.e2e.daemon import Daemon, daemon
from tests.server.fake_engine import FakeEngine, Script
from tiercel.settings.settings import EngineSettings
from tiercel.wire.step_record import StepRecord

PROGRAM = (sys.executable, "-m", "tests.clients.following_server")
ROOT = Path(__file__).parents[2]


def following_daemon(folder: Path, *flags: str) -> AbstractContextManager[Daemon]:
    """Serve until the block ends."""
    return daemon(folder, *flags, program=PROGRAM, variables={"PYTHONPATH": str(ROOT)})


async def _compute(fd: int, record_fd: int) -> int:
    model = FollowingModel()
    engine = FakeEngine(
        Script(
            reply_to=model.answer, end_token=END, vocab_size=model.vocab_size, max_model_len=4096, blocks_total=4096
        ),
        StepRecord.open(EngineSettings(model="").record_rows, record_fd),
    )
    await engine.open(socket.socket(fileno=fd))
    await engine.closed.wait()
    return 0 if engine.has_quit else 9


def main() -> None:
    """Serve, or be the engine of a server."""
    if "--fd" in sys.argv:
        parser = argparse.ArgumentParser()
        for flag in ("--fd", "--arena-fd", "--record-fd"):
            parser.add_argument(flag, type=int)
        arguments, _ = parser.parse_known_args()
        sys.exit(asyncio.run(_compute(arguments.fd, arguments.record_fd)))
    from tiercel.cli.main import main as run_command  # lazy: the engine does not need it
    from tiercel.server import launch

    launch.engine_command = lambda: PROGRAM
    run_command(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    main()

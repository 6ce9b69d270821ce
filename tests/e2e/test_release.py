"""An engine gives up its SSD tier while it serves on, and another one takes over the volume."""

import contextlib
from pathlib import Path

import pytest

from tests.e2e.test_restart import HandEngine
from tiercel.embedded import MODEL_DIR
from tiercel.server.client.child import EngineChild, engine_command
from tiercel.server.client.inherited import InheritedResources
from tiercel.settings.settings import EngineSettings
from tiercel.system.kv_folder import lock_folder
from tiercel.values.errors import ConfigError
from tiercel.values.tier import Route
from tiercel.wire.frames import DiskReleased, ReleaseDisk, encode_frame

PROMPT = [100 + number * 7919 % 1000 for number in range(500)]
BLOCKS = len(PROMPT) // 16
CACHED = 16 * BLOCKS


class ReleasingEngine(HandEngine):
    """An engine that can be told to release the disk."""

    def wait_written(self, blocks: int) -> None:
        """Wait until a number of blocks are on the disk."""
        while sum(route.blocks for route in self.gauges.routes if route.route is Route.PERSIST) < blocks:
            self._take()

    def release(self, lock_fds: tuple[int, ...]) -> bool:
        self.child.sock.sendall(encode_frame(ReleaseDisk(lock_fds)))
        while True:
            for message in self._receive():
                if isinstance(message, DiskReleased):
                    return message.is_released


@pytest.mark.slow
def test_another_engine_finds_what_the_first_has_written_and_the_first_serves_on(tmp_path: Path) -> None:
    settings = EngineSettings(
        model=str(MODEL_DIR), num_gpu_blocks_override=300, threads=1, log_level="warning",
        kv_disk_paths=(str(tmp_path / "kv"),), kv_disk_bytes=64 << 20,
    )  # fmt: skip
    with contextlib.ExitStack() as closing:
        inherited = closing.enter_context(InheritedResources.open(settings))
        child = closing.enter_context(EngineChild.start(engine_command(), inherited))
        first = ReleasingEngine(child, settings)
        output, _ = first.ask(1, PROMPT)
        first.wait_written(BLOCKS)
        with pytest.raises(ConfigError, match="in use"):
            lock_folder(tmp_path / "kv")
        assert first.release(inherited.lock_fds)
        inherited.unlock()
        assert not inherited.lock_fds
        again = closing.enter_context(InheritedResources.open(settings))
        other = closing.enter_context(EngineChild.start(engine_command(), again))
        second = HandEngine(other, settings)
        assert first.ask(2, PROMPT) == (output, CACHED)
        assert first.ask(3, PROMPT[::-1])[1] == 0
        assert second.ask(1, PROMPT) == (output, CACHED)

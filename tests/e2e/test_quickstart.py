"""The commands of docs/quickstart.md, run in order with a real daemon."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "quickstart.md"
BIN = Path(sys.executable).parent


def blocks() -> list[str]:
    found = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert len(found) == 8
    return found


class Reader:
    """A reader who types the commands of the page, in an empty folder and with a free port."""

    def __init__(self, folder: Path) -> None:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("TIERCEL_", "VLLM_"))}
        self.environment = own | {"PATH": f"{BIN}:{os.environ['PATH']}", "TIERCEL_CALIBRATION_SECONDS": "0"}
        self.folder = folder
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        self._server: subprocess.Popen[bytes] | None = None
        self._log = folder / "log"

    def type(self, block: str) -> str:
        """Run a block and return its output. A server keeps running; the one before it must end with 0."""
        text = block.replace("8000", str(self.port))
        if "tiercel serve" in text:
            self._serve(text.strip())
            return ""
        script = "\n".join(line for line in text.splitlines() if not line.startswith(("make ", "export PATH")))
        asks = r"^tiercel (?:chat|tenants list|config (?:set|get|reload))"
        script = re.sub(asks, rf"\g<0> --url http://127.0.0.1:{self.port}", script, flags=re.MULTILINE)
        exported = re.search(r"^export (TIERCEL_ADMIN_KEY)=(\S+)$", script, flags=re.MULTILINE)
        if exported:
            self.environment[exported[1]] = exported[2]
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ran.returncode == 0, f"{script}\n{ran.stdout}\n{ran.stderr}\n{self._log.read_text()}"
        return ran.stdout

    def _serve(self, command: str) -> None:
        self.end()
        flags = [] if "--config" in command else ["--port", str(self.port)]
        with self._log.open("ab") as log:
            self._server = subprocess.Popen(
                [BIN / "tiercel", *command.split()[1:], *flags],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
            )
        end_s = time.monotonic() + 60
        while True:
            assert self._server.poll() is None, self._log.read_text()
            assert time.monotonic() < end_s
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/ready").status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.05)

    def end(self) -> None:
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)
            assert self._server.wait(40) == 0
            self._server = None

    def kill(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_the_commands_of_the_page_run_in_order(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    try:
        install, serve, ask, write, serve_two, use, *rest = blocks()
        assert reader.type(install).startswith("tiercel ")
        reader.type(serve)
        assert "4821" in reader.type(ask)
        shown = reader.type(write)
        assert re.search(r"max-num-seqs +64 +file", shown)
        reader.type(serve_two)
        printed = reader.type(use)
        assert '"finish_reason":"stop"' in printed
        assert re.search(r"^chat +4 .*\n(.*\n)*batch +1 ", printed, flags=re.MULTILINE)
        change, load = rest
        reported = reader.type(change)
        assert "version 2" in reported
        assert "tenants version 2" in reported
        assert re.search(r"10\b", reader.type(load))
        reader.end()
    finally:
        reader.kill()

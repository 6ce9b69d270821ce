"""`tiercel run-batch`: answer a file of requests in OpenAI's batch format, without a server or with a running one."""

import asyncio
import contextlib
import inspect
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tiercel.cli.console import fail
from tiercel.settings.config import client_api_key, resolve
from tiercel.settings.option import flag_name
from tiercel.system.file_fault import file_fault
from tiercel.system.server_url import read_server_url
from tiercel.values.errors import ConfigError

if TYPE_CHECKING:
    import httpx

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_COMMAND = "import sys; from tiercel.cli.main import main; sys.exit(main())"
_START_S = 600.0  # for the model to load
_END_S = 60.0  # for the server to exit
_POLL_S = 0.1
_CONCURRENCY = 32
_NEEDED = {"input_file": "-i", "output_file": "-o"}
_OWN_SERVER = ("uds", "host", "port", "admin_port", "admin_uds", "takeover")  # the server of this verb is private


def _own(name: str, *flags: str, text: str, kind: type, metavar: str) -> inspect.Parameter:
    option = typer.Option(*flags, help=text, metavar=metavar, show_default=False)
    return inspect.Parameter(name, _KEYWORD, default=None, annotation=Annotated[kind | None, option])


RUN_BATCH_FLAGS = [
    _own("input_file", "-i", "--input-file", text="File with one request on each line.", kind=str, metavar="FILE"),
    _own("output_file", "-o", "--output-file", text="File for the answers; replaced.", kind=str, metavar="FILE"),
    _own("url", "--url", text="Running server; default: start one.", kind=str, metavar="URL"),
    _own("max_concurrency", "--max-concurrency", text="Lines that are asked at a time [32].", kind=int, metavar="N"),
]


def run_batch(given: dict[str, object]) -> int:
    """Answer a file of requests in the format of OpenAI's batches.

    Starts a server for the time of the run, with the flags of `tiercel serve`,
    or uses a running one (--url; its key from --api-key or TIERCEL_API_KEY).
    Lines are answered in any order; a line that fails does not stop the others.
    Exit code 0: every line has an answer with status 200; 1: at least one has
    not; 2: a flag or a file is wrong.
    """
    source, target = (_path(given, name) for name in _NEEDED)
    url, concurrency = given.pop("url", None), given.pop("max_concurrency", _CONCURRENCY)
    assert isinstance(concurrency, int)
    if (fault := file_fault(source)) is not None:
        raise ConfigError("run_batch.input", f"-i {source}: {fault}")
    if target.exists() and target.samefile(source):
        raise ConfigError("run_batch.output", f"-o {target}: this is the input file")
    if concurrency < 1:
        raise ConfigError("run_batch.concurrency", f"--max-concurrency {concurrency}: expected a number from 1")
    try:
        if url is not None:
            key = given.pop("api_key", None)
            if given:
                flags = ", ".join(map(flag_name, given))
                raise ConfigError("run_batch.url", f"{flags}: --url names a server that has its own settings")
            return _with_url(str(url), _one(key) or client_api_key(), source, target, concurrency)
        return _with_own_server(given, source, target, concurrency)
    except OSError as exc:
        fail(f"{exc.filename or target}: {exc.strerror}")
        return 1


def _path(given: dict[str, object], name: str) -> Path:
    value = given.pop(name, None)
    if value is None:
        raise ConfigError("run_batch.file", f"{_NEEDED[name]} is missing: name a file")
    return Path(str(value))


def _one(value: object) -> str | None:
    return str(value[0]) if isinstance(value, list) and value else None  # pyright: ignore


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def _with_url(url: str, key: str | None, source: Path, target: Path, concurrency: int) -> int:
    # lazy: httpx, which `tiercel serve` does not need
    import httpx

    base = read_server_url(url, "--url")
    return _run(httpx.AsyncHTTPTransport(retries=1), base, _headers(key), source, target, concurrency, None)


def _with_own_server(given: dict[str, object], source: Path, target: Path, concurrency: int) -> int:
    # lazy: as above
    import httpx

    for name in _OWN_SERVER:
        if name in given:
            raise ConfigError("run_batch.flag", f"{flag_name(name)} has no effect: the server of run-batch is private")
    server = resolve(dict(given)).settings.server  # raises before anything is started
    key = server.api_keys[0] if server.api_keys else client_api_key()  # of a tenant, with a tenants file
    with tempfile.TemporaryDirectory(prefix="tiercel-") as folder:
        path = Path(folder) / "server"
        with _server(given, path) as process:
            if process is None:
                return 1
            transport = httpx.AsyncHTTPTransport(uds=str(path))
            return _run(transport, "http://localhost", _headers(key), source, target, concurrency, process)


@contextlib.contextmanager
def _server(given: Mapping[str, object], path: Path) -> Iterator["subprocess.Popen[bytes] | None"]:
    """Run a server on a Unix socket until the block ends; None if it could not start. Its errors are on stderr."""
    # lazy: as above
    import httpx

    words = [f"{flag_name(name)}={value}" for name, values in given.items() for value in _values(values)]
    command = [sys.executable, "-c", _COMMAND, "serve", *words, "--uds", str(path), "--control-socket", ""]
    if "log_level" not in given:
        command += ["--log-level", "error"]
    if "enable_log_requests" not in given:
        command.append("--no-enable-log-requests")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603 - our own command line
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as http:
            is_ready = _wait_ready(http, process)
        yield process if is_ready else None
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(http: "httpx.Client", process: "subprocess.Popen[bytes]") -> bool:
    # lazy: as above
    import httpx

    end_s = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < end_s:
        with contextlib.suppress(httpx.HTTPError):
            if http.get("/ready").status_code == 200:
                return True
        time.sleep(_POLL_S)
    fail("the server has not started")
    return False


def _values(values: object) -> list[object]:
    return list(values) if isinstance(values, list) else [values]  # pyright: ignore


def _run(
    transport: "httpx.AsyncHTTPTransport",
    base: str,
    headers: dict[str, str],
    source: Path,
    target: Path,
    concurrency: int,
    process: "subprocess.Popen[bytes] | None",
) -> int:
    # lazy: as above
    import httpx

    # lazy: httpx too
    from tiercel.cli.batch_client import BatchClient

    async def run() -> int:
        async with httpx.AsyncClient(base_url=base, headers=headers, transport=transport, timeout=None) as http:  # noqa: S113
            client = BatchClient(http, target, concurrency, lambda: process is not None and process.poll() is not None)
            await client.run(source)
            return 1 if client.num_failed else 0

    return asyncio.run(run())

"""A file that cannot be read is reported in the words of the system, whichever file it is."""

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiercel.engine.models.generation import read_end_tokens
from tiercel.engine.models.weights import open_checkpoint, open_tensors
from tiercel.loadtest.load.tokens import FolderCounter
from tiercel.modelfile.checkpoint import read_json_object, resolve_model_folder
from tiercel.modelfile.errors import ModelFileError
from tiercel.modelfile.header import read_header
from tiercel.server.tenancy.tenant_file import load_tenant_file
from tiercel.server.text.tokenizer import load_text_codec
from tiercel.settings.config import resolve
from tiercel.system.file_fault import is_there
from tiercel.values.errors import ConfigError

_NOBODY = 65534


def _open_weights(folder: Path) -> None:
    with open_tensors(open_checkpoint(folder)):
        raise AssertionError("opened")


def _resolve_certificate(folder: Path) -> None:
    resolve(dict.fromkeys(("ssl_certfile", "ssl_keyfile"), str(folder / "key.pem")))


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "weights": ("model.safetensors", _open_weights),
    "index": ("model.safetensors.index.json", _open_weights),
    "configuration": ("config.json", lambda folder: read_json_object(folder / "config.json")),
    "end tokens": ("generation_config.json", read_end_tokens),
    "tokenizer": ("tokenizer.json", load_text_codec),
    "tokenizer of a load test": ("tokenizer.json", FolderCounter),
    "template": ("chat.jinja", lambda folder: resolve({"chat_template": str(folder / "chat.jinja")})),
    "tenants": ("tenants.yaml", lambda folder: load_tenant_file(folder / "tenants.yaml")),
    "settings": ("tiercel.toml", lambda folder: resolve({"config": str(folder / "tiercel.toml")})),
    "certificate": ("key.pem", _resolve_certificate),
    "GGUF": ("model.gguf", lambda folder: read_header(folder / "model.gguf")),
    "GGUF by name": ("model.gguf", lambda folder: resolve_model_folder(str(folder / "model.gguf"))),
}


def _forbid(path: Path) -> None:
    path.write_text("{}")
    path.chmod(0)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


FAULTS: dict[int, Callable[[Path], None]] = {
    errno.EACCES: _forbid,
    errno.EISDIR: lambda path: path.mkdir(),
    errno.ELOOP: _loop,
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that another user may read, as that user if this one may read everything."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize("fault", FAULTS, ids=errno.errorcode.get)
@pytest.mark.parametrize("reader", READERS)
def test_the_error_is_that_of_the_system(reader: str, fault: int, folder: Path) -> None:
    name, read = READERS[reader]
    if (reader, fault) == ("GGUF by name", errno.EISDIR):
        return  # it is a folder without config.json
    FAULTS[fault](folder / name)
    euid = os.geteuid()
    try:
        if euid == 0:
            os.seteuid(_NOBODY)
        with pytest.raises((ConfigError, ModelFileError)) as caught:
            read(folder)
    finally:
        os.seteuid(euid)
    message = str(caught.value)
    assert os.strerror(fault) in message and name in message, message
    assert "not a whole" not in message and "No such file" not in message
    assert "\n" not in message


def test_only_a_missing_file_is_missing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    assert is_there(tmp_path / "file") and is_there(tmp_path)
    assert not any(is_there(tmp_path / name) for name in ("nowhere", "dangling", "file/below"))
    with pytest.raises(ConfigError, match="File name too long"):
        is_there(tmp_path / ("x" * 300))

"""The static files of the page, read into memory at the start."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tiercel.system.file_fault import list_folder

_FOLDER = Path(__file__).with_name("static")
_TYPE_BY_ENDING = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file, ready to send."""

    body: bytes
    media_type: str
    etag: str


def read_static_files(folder: Path = _FOLDER) -> Mapping[str, StaticFile]:
    """Return every file that may be requested, by its path below `folder`. Errors: OSError."""
    found: dict[str, StaticFile] = {}
    for path in list_folder(folder):
        if path.is_dir():
            found |= {f"{path.name}/{name}": file for name, file in read_static_files(path).items()}
        elif path.suffix in _TYPE_BY_ENDING:
            found[path.name] = _read(path)
    return found


def _read(path: Path) -> StaticFile:
    body = path.read_bytes()
    return StaticFile(body, _TYPE_BY_ENDING[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')

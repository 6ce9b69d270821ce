"""The files of the page, read once into memory."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).with_name("static")
_TYPE_BY_ENDING = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file as it is sent."""

    body: bytes
    media_type: str
    etag: str


def read_static_files(folder: Path = _FOLDER) -> Mapping[str, StaticFile]:
    """Every file that a browser may ask for, by its path below `folder`. A name that is not here does not exist."""
    return {
        path.relative_to(folder).as_posix(): _read(path)
        for path in sorted(folder.rglob("*"))
        if path.suffix in _TYPE_BY_ENDING
    }


def _read(path: Path) -> StaticFile:
    body = path.read_bytes()
    return StaticFile(body, _TYPE_BY_ENDING[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')

"""A folder that may not be read, for tests that may run as root, who may read all."""

import errno
import os
from pathlib import Path

import pytest


def hide(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Refuse to list a folder, as the kernel does to a user without the right."""
    for name in ("listdir", "scandir"):
        real = getattr(os, name)

        def refuse(path: object = ".", *, real: object = real) -> object:
            if isinstance(path, str | Path) and Path(path) == folder:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
            return real(path)  # pyright: ignore

        monkeypatch.setattr(os, name, refuse)

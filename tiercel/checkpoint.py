"""Find the files of a model: in a folder, or in the hub cache that other tools have filled. Nothing is downloaded."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from tiercel.errors import ConfigError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model_folder(name: str, environ: Mapping[str, str]) -> Path:
    """Return the folder of a model: `name` if it is a folder, else the cached snapshot of `org/name`.

    `environ` is the environment of the process; HF_HUB_CACHE, HF_HOME and XDG_CACHE_HOME set the place of the cache.
    Errors: ConfigError if neither exists, or the folder holds no config.json.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.exists():
            raise ConfigError("model.not_a_folder", f"{name}: a file; give the folder that holds config.json")
        if not _HUB_NAME.fullmatch(name):
            raise ConfigError("model.not_found", f"{name}: no such folder")
        folder = _cached_snapshot(name, _hub_cache(environ))
    if not (folder / "config.json").is_file():
        raise ConfigError("model.no_config", f"{folder}: no config.json in this folder")
    return folder


def read_json_object(path: Path) -> dict[str, object]:
    """Return the object in a JSON file of a model folder.

    Errors: ConfigError naming the file if it cannot be read, is not JSON or holds no object.
    """
    try:
        value = cast(object, json.loads(path.read_text(encoding="utf-8")))
    except OSError as exc:
        raise ConfigError("model.unreadable", f"{path}: cannot be read: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError("model.bad_json", f"{path}: not valid JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ConfigError("model.bad_json", f"{path}: not a JSON object")
    return cast("dict[str, object]", value)


def _hub_cache(environ: Mapping[str, str]) -> Path:
    if cache := environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    caches = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "~")).expanduser() / ".cache")
    return Path(caches).expanduser() / "huggingface" / "hub"


def _cached_snapshot(name: str, cache: Path) -> Path:
    folder = cache / f"models--{name.replace('/', '--')}"
    if not folder.is_dir():
        raise ConfigError(
            "model.not_found", f"{name}: no such folder, and not in the hub cache {cache}; download it first"
        )
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        revisions = sorted(path.name for path in (folder / "snapshots").glob("*") if path.is_dir())
        if len(revisions) != 1:
            raise ConfigError(
                "model.not_found", f"{name}: {folder} has no refs/main and {len(revisions)} snapshots; give the folder"
            ) from None
        revision = revisions[0]
    snapshot = folder / "snapshots" / revision
    if not re.fullmatch(r"[\w.-]+", revision) or not snapshot.is_dir():
        raise ConfigError("model.not_found", f"{name}: {folder} has no snapshot of revision {revision!r}")
    return snapshot

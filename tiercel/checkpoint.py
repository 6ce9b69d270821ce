"""Find the files of a model: a folder, or a name in the Hugging Face cache. Nothing is downloaded."""

import json
import re
from pathlib import Path
from typing import cast

from tiercel.errors import ConfigError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model_folder(name: str, hub_cache: str | None = None) -> Path:
    """Return the folder of a model: `name` itself if it is a folder, else the cached snapshot of `org/name`.

    `hub_cache` is the folder of the Hugging Face cache; None: the one that huggingface_hub uses.
    Errors: ConfigError if there is neither, or the folder holds no config.json.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.exists():
            raise ConfigError("model.not_a_folder", f"{name}: a file; give the folder that holds config.json")
        if not _HUB_NAME.fullmatch(name):
            raise ConfigError("model.not_found", f"{name}: no such folder")
        folder = _cached_snapshot(name, hub_cache)
    if not (folder / "config.json").is_file():
        raise ConfigError("model.no_config", f"{folder}: no config.json in this folder")
    return folder


def _cached_snapshot(name: str, hub_cache: str | None) -> Path:
    # lazy: it takes a tenth of a second, and a model in a folder does without it
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(hub_cache or HF_HUB_CACHE).expanduser()
    found = try_to_load_from_cache(name, "config.json", cache_dir=cache)
    if not isinstance(found, str):
        raise ConfigError(
            "model.not_found",
            f"{name}: no such folder, and no config.json of its revision main in the hub cache {cache}; "
            "download it first, or give the folder",
        )
    return Path(found).parent


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

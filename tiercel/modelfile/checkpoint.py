"""Find the files of a model: a folder, a GGUF file, or a name in the Hugging Face cache. Nothing is downloaded."""

import json
import re
from pathlib import Path
from typing import cast

from tiercel.modelfile.errors import ModelFileError
from tiercel.modelfile.folder import SUFFIX, unfold_model
from tiercel.system.file_fault import file_fault, folder_fault, is_there
from tiercel.values.errors import ConfigError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model_folder(name: str, hub_cache: str | None = None, own_cache: str | None = None) -> Path:
    """Return the folder of a model: `name` itself if it is a folder, else the cached snapshot of `org/name`.

    A GGUF file is unfolded into a folder below `own_cache`. `hub_cache` is the folder of the Hugging Face cache; None:
    the one that huggingface_hub uses.

    Errors: ConfigError if there is neither, the folder holds no config.json, or the file is not supported.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if is_there(folder) and (fault := file_fault(folder)) is not None:
            raise ConfigError("model.unreadable", f"{name}: {fault}")
        if folder.suffix == SUFFIX and folder.is_file():
            return _unfolded(folder, own_cache)
        if folder.exists():
            raise ConfigError(
                "model.not_a_folder", f"{name}: a file; give the folder that holds config.json, or a {SUFFIX} file"
            )
        if folder.suffix == SUFFIX or not _HUB_NAME.fullmatch(name):
            raise ConfigError("model.not_found", f"{name}: no such {'file' if folder.suffix == SUFFIX else 'folder'}")
        folder = _cached_snapshot(name, hub_cache)
    if (fault := folder_fault(folder)) is not None:
        raise ConfigError("model.unreadable", f"{folder}: {fault}")
    if not is_there(folder / "config.json"):
        raise ConfigError("model.no_config", f"{folder}: no config.json in this folder")
    return folder


def _unfolded(path: Path, cache: str | None) -> Path:
    if cache is None:
        raise ConfigError("model.cache", f"{path}: no home folder to unfold it in; set XDG_CACHE_HOME")
    try:
        return unfold_model(path, Path(cache) / "models")
    except ModelFileError as exc:
        raise ConfigError(exc.code, str(exc)) from exc


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
        value = cast(object, json.loads(path.read_text(encoding="utf-8-sig")))
    except OSError as exc:
        raise ConfigError("model.unreadable", f"{path}: cannot be read: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError("model.bad_json", f"{path}: not valid JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ConfigError("model.bad_json", f"{path}: not a JSON object")
    return cast("dict[str, object]", value)

"""Read the end-of-sequence tokens of a model folder."""

from pathlib import Path
from typing import cast

from tiercel.modelfile.checkpoint import read_json_object
from tiercel.system.file_fault import is_there
from tiercel.values.errors import ConfigError


def read_end_tokens(folder: Path) -> tuple[int, ...]:
    """Return the end-of-sequence ids of generation_config.json, else of config.json; empty if neither names any.

    Errors: ConfigError if a file is not JSON, or eos_token_id is neither an id nor a list of ids.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not is_there(path):
            continue
        value = read_json_object(path).get("eos_token_id")
        ids = cast("list[object]", value) if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and token >= 0 for token in ids):
            raise ConfigError("model.bad_eos", f"{path}: eos_token_id is {value!r}, expected an id or a list of ids")
        if ids:
            return tuple(cast("list[int]", ids))
    return ()

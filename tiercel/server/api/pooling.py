"""The pooling of a prompt's states into one vector, by the settings and by the files of the model."""

import json
from pathlib import Path
from typing import Literal, cast

from msgspec import Struct

from tiercel.modelfile.checkpoint import read_json_object
from tiercel.system.file_fault import is_there
from tiercel.values.request import Pooling

PoolingSource = Literal["auto", "last", "mean"]

_POOLING_BY_MODE: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "lasttoken": "last",
    "mean": "mean",
}
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
_SIZE_NAMES = ("hidden_size", "n_embd", "d_model")


class PoolingStyle(Struct, frozen=True):
    """The pooling of a server."""

    pooling: Pooling | None  # None: the model needs one that this server does not have
    hidden_size: int | None  # numbers of a vector; None if config.json does not tell
    reason: str = ""  # why there is none
    is_declared: bool = False  # the model's files say how to pool, as those of models that were trained for it do

    @property
    def score(self) -> str:
        """The meaning of the numbers of /v1/score and /v1/rerank, as the value of the header `x-tiercel-score`."""
        return f"cosine; model={'embedding' if self.is_declared else 'generative'}"


def read_pooling(model: Path, source: PoolingSource) -> PoolingStyle:
    """Return the pooling; "auto" is what the files of sentence-transformers say, and "last" without such files."""
    config = model / "config.json"
    size = _hidden_size(read_json_object(config)) if is_there(config) else None
    modules = _modules(model / "modules.json")
    if source != "auto":
        return PoolingStyle(source, size, is_declared="Pooling" in modules)
    unknown = [kind for kind in modules if kind not in _KNOWN_MODULES]
    if unknown:
        return PoolingStyle(None, size, f"its modules.json has a module {unknown[0]}")
    if "Pooling" not in modules:
        return PoolingStyle("last", size)
    fields = read_json_object(model / modules["Pooling"] / "config.json")
    modes = [name for name, value in fields.items() if name.startswith("pooling_mode_") and value is True]
    if isinstance(mode := fields.get("pooling_mode"), str):
        modes.append(mode)
    if len(modes) != 1 or modes[0] not in _POOLING_BY_MODE:
        return PoolingStyle(None, size, f"its pooling is {', '.join(modes) or 'not known'}")
    return PoolingStyle(_POOLING_BY_MODE[modes[0]], size, is_declared=True)


def _modules(path: Path) -> dict[str, str]:
    """Return the folder of each module by its kind; nothing if the model has no such file."""
    if not is_there(path):
        return {}
    entries = cast(list[dict[str, str]], json.loads(path.read_text(encoding="utf-8")))
    return {entry["type"].rpartition(".")[2]: entry["path"] for entry in entries}


def _hidden_size(config: dict[str, object]) -> int | None:
    text = config.get("text_config")
    fields = config | (cast(dict[str, object], text) if isinstance(text, dict) else {})
    return next((size for name in _SIZE_NAMES if isinstance(size := fields.get(name), int)), None)

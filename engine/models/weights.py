"""Load weights from a Hugging Face folder: safetensors, one file or shards, tensor by tensor."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tiercel.errors import ConfigError

Progress = Callable[[int, int], None]
"""Called after every tensor with the bytes loaded so far and in total."""

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FOREIGN = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")
_DERIVED = (".rotary_emb.inv_freq", ".self_attn.bias", ".self_attn.masked_bias")  # in old checkpoints; not used
_CHUNK_WORDS = 1 << 17  # 1 MiB
_NAME_MAX = 255  # bytes of the name of a file on Linux


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The safetensors files of a folder. `shards` lists for each file the tensors that it must hold; None means any."""

    folder: Path
    shards: tuple[tuple[Path, frozenset[str] | None], ...]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Find the weights of a folder without reading them.

    Errors: ConfigError if there are no weights, only other formats, a missing shard, or a shard not in the index.
    """
    if (folder / _INDEX).is_file():
        return Checkpoint(folder, _read_index(folder))
    if (folder / _SINGLE).is_file():
        return Checkpoint(folder, ((folder / _SINGLE, None),))
    for path in sorted(folder.iterdir() if folder.is_dir() else ()):
        if path.suffix in _FOREIGN:
            raise ConfigError("weights.format", f"{path}: only safetensors weights are read; convert this file first")
    raise ConfigError("weights.none", f"{folder}: neither {_SINGLE} nor {_INDEX} exists")


def _read_index(folder: Path) -> tuple[tuple[Path, frozenset[str]], ...]:
    path = folder / _INDEX
    try:
        file_by_name = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as exc:
        raise ConfigError("weights.bad_index", f"{path}: no readable weight_map") from exc
    if not isinstance(file_by_name, dict) or not file_by_name:
        raise ConfigError("weights.bad_index", f"{path}: weight_map must be an object with entries")
    names_by_file: dict[str, set[str]] = {}
    for name, file in file_by_name.items():
        is_name = (
            isinstance(file, str) and Path(file).name == file and len(file.encode("utf-8", "replace")) <= _NAME_MAX
        )
        if not is_name or not file.endswith(".safetensors"):
            shown = repr(file)[:300]
            raise ConfigError("weights.bad_index", f"{path}: {name} points to {shown}, which is no file of the folder")
        names_by_file.setdefault(file, set()).add(name)
    for file in sorted(names_by_file):
        if not (folder / file).is_file():
            raise ConfigError("weights.no_shard", f"{folder / file}: the index names this file, but it is missing")
    for extra in sorted(folder.glob("model-*-of-*.safetensors")):
        if extra.name not in names_by_file:
            raise ConfigError("weights.extra_shard", f"{extra}: a shard that {_INDEX} does not name")
    return tuple((folder / file, frozenset(names)) for file, names in sorted(names_by_file.items()))


def stream_tensors(checkpoint: Checkpoint) -> Iterator[tuple[Path, str, Tensor]]:
    """Yield file, name and tensor, one at a time. A tensor is a view of its file, valid until the next one.

    Cost:   no anonymous memory, because files are mapped and not copied.
    Errors: ConfigError naming the file if it is truncated or its header is broken, and the tensor if the file and the
            index disagree.
    """
    for path, expected in checkpoint.shards:
        with _translated(path), safe_open(path, framework="pt", device="cpu") as file:
            names = file.keys()
            if expected is not None and expected != set(names):
                name = min(expected.symmetric_difference(names))
                where = "lacks it" if name in expected else "has it, the index does not"
                raise ConfigError("weights.bad_index", f"{path}: tensor {name}: the file {where}")
            for name in names:
                yield path, name, file.get_tensor(name)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as exc:
        raise ConfigError("weights.broken", f"{path}: not a whole safetensors file: {exc}") from exc


class ContentDigest:
    """A digest of 32 bytes over everything that was loaded: names, shapes, dtypes and content.

    It does not protect against forgery. Content enters as weighted sums of 64-bit words with odd weights, one sum per
    MiB. Any single change shows, at the speed of memory (about 5 GB/s per core; SHA-256 reaches 1).
    """

    def __init__(self, *facts: str) -> None:
        self._digest_by_name: dict[str, bytes] = {}
        self._facts = facts
        self._weights = torch.arange(_CHUNK_WORDS, dtype=torch.int64) * 2 + 1

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor of the checkpoint, in any order."""
        digest = hashlib.sha256(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().contiguous().flatten().view(torch.uint8)
        whole = flat.numel() // 8 * 8
        if whole:
            for words in flat[:whole].view(torch.int64).split(_CHUNK_WORDS):
                total = int(torch.dot(words, self._weights[: words.numel()]))
                digest.update(total.to_bytes(8, "little", signed=True))
        digest.update(bytes(flat[whole:].tolist()))
        self._digest_by_name[name] = digest.digest()

    def finish(self) -> bytes:
        """Return the 32 bytes."""
        digest = hashlib.sha256("\0".join(self._facts).encode())
        for name in sorted(self._digest_by_name):
            digest.update(self._digest_by_name[name])
        return digest.digest()


def load_weights(
    targets: Mapping[str, Tensor], checkpoint: Checkpoint, digest: ContentDigest, progress: Progress | None
) -> None:
    """Copy every tensor of a checkpoint to its target, cast to the target's dtype.

    Cost:   one read of the files; no anonymous memory beside the targets.
    Errors: ConfigError naming file and tensor if a tensor is missing, has no target or has another shape.
    """
    missing = dict(targets)
    total = sum(tensor.nbytes for tensor in targets.values())
    loaded = 0
    path = checkpoint.folder
    for path, name, tensor in stream_tensors(checkpoint):
        target = missing.pop(name, None)
        if target is None:
            if name.endswith(_DERIVED) or name == "lm_head.weight":
                continue  # derived from the config, or tied to the embedding
            raise ConfigError("weights.extra_tensor", f"{path}: tensor {name}: this architecture has no such tensor")
        if tensor.shape != target.shape:
            raise ConfigError(
                "weights.shape", f"{path}: tensor {name}: shape {list(tensor.shape)}, not {list(target.shape)}"
            )
        if not tensor.is_floating_point():
            raise ConfigError(
                "weights.dtype", f"{path}: tensor {name}: dtype {tensor.dtype} is not a floating-point type"
            )
        target.copy_(tensor)
        digest.add(name, tensor)
        loaded += target.nbytes
        if progress is not None:
            progress(loaded, total)
    if missing:
        name = min(missing)
        raise ConfigError("weights.missing", f"{path}: tensor {name} is missing, and {len(missing) - 1} more")


def fill_dummy(targets: Mapping[str, Tensor], seed: int, std: float = 0.02) -> None:
    """Draw normal weights with this deviation, and set norms to 1. Reproducible for a seed, shapes and a dtype."""
    for index, name in enumerate(sorted(targets)):
        target = targets[name]
        if name.endswith("norm.weight"):
            target.fill_(1.0)
            continue
        generator = torch.Generator(device=target.device).manual_seed(seed * 1_000_003 + index)
        target.normal_(0.0, std, generator=generator)

"""Load weights from a folder, tensor by tensor: safetensors, one file or shards, or a GGUF file."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tiercel.engine.models.model_file import open_model_file
from tiercel.engine.models.quantization import WrongTensorError, roles_of
from tiercel.engine.models.quantized_parts import QuantizedTarget
from tiercel.engine.native.linear import return_freed_memory
from tiercel.modelfile.errors import ModelFileError
from tiercel.modelfile.folder import LINKED_NAME, SUFFIX, check_unfolded
from tiercel.system.file_fault import check_file, is_there, list_folder
from tiercel.values.errors import ConfigError
from tiercel.values.facts import Facts, canonical

Progress = Callable[[int, int], None]
"""Called after every tensor with the bytes loaded so far and in total."""

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FOREIGN = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
_DERIVED = (".rotary_emb.inv_freq", ".self_attn.bias", ".self_attn.masked_bias")  # in old checkpoints; not used
_CHUNK_WORDS = 1 << 17  # 1 MiB
_UNPACKED_BYTES = 2 << 20  # of weights in 8 bits that have been packed, after which their memory is returned
_NAME_MAX = 255  # bytes of the name of a file on Linux


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files of a folder's weights. `shards` lists for each file the tensors that it must hold; None means any."""

    folder: Path
    shards: tuple[tuple[Path, frozenset[str] | None], ...]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Find the weights of a folder without reading them.

    Errors: ConfigError if there are no weights, only other formats, a missing shard, or a shard not in the index.
    """
    if is_there(folder / _INDEX):
        return Checkpoint(folder, _read_index(folder))
    if is_there(folder / _SINGLE):
        return Checkpoint(folder, ((folder / _SINGLE, None),))
    if (folder / LINKED_NAME).exists():
        with _translated(folder / LINKED_NAME):
            check_unfolded(folder)
        return Checkpoint(folder, ((folder / LINKED_NAME, None),))
    for path in list_folder(folder) if is_there(folder) else ():
        if path.suffix in _FOREIGN:
            raise ConfigError("weights.format", f"{path}: only safetensors weights are read; convert this file first")
    raise ConfigError("weights.none", f"{folder}: neither {_SINGLE} nor {_INDEX} exists")


def _read_index(folder: Path) -> tuple[tuple[Path, frozenset[str]], ...]:
    path = folder / _INDEX
    try:
        file_by_name = json.loads(path.read_text(encoding="utf-8-sig"))["weight_map"]
    except OSError as exc:
        raise ConfigError("weights.unreadable", f"{path}: cannot be read: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
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
        if not is_there(folder / file):
            raise ConfigError("weights.no_shard", f"{folder / file}: the index names this file, but it is missing")
    for extra in list_folder(folder, "model-*-of-*.safetensors"):
        if extra.name not in names_by_file:
            raise ConfigError("weights.extra_shard", f"{extra}: a shard that {_INDEX} does not name")
    return tuple((folder / file, frozenset(names)) for file, names in sorted(names_by_file.items()))


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A stored tensor, or one matrix of several in it, or rows of that matrix."""

    stored: str  # its name in the files
    matrix: int | None = None  # None: the whole tensor
    start: int = 0
    end: int | None = None  # rows of the matrix; None: to the last one


class TensorFiles:
    """The open files of a checkpoint: names of tensors, and their content in any order."""

    def __init__(
        self, file_by_name: dict[str, tuple[Path, Any]], pieces: Mapping[str, TensorPiece] | None = None
    ) -> None:  # Any: safetensors has no types
        """`pieces`: what the tensors are called, and where they are; None: as they are stored."""
        self._file_by_name = file_by_name
        self._pieces = {name: TensorPiece(name) for name in file_by_name} if pieces is None else pieces

    def of_pieces(self, pieces: Mapping[str, TensorPiece]) -> "TensorFiles":
        """Return the same files with other names."""
        return TensorFiles(self._file_by_name, pieces)

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    @property
    def last_path(self) -> Path:
        """The file of the last tensor."""
        return self.path(list(self._pieces)[-1])

    def path(self, name: str) -> Path:
        """Return the file of a tensor."""
        return self._file_by_name[self._pieces[name].stored][0]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that is stored under this name. Errors: ConfigError naming the file."""
        path, file = self._file_by_name[name]
        with _translated(path):
            return tuple(file.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """Return a tensor: a view of its file, valid while the files are open. Errors: ConfigError naming the file."""
        piece = self._pieces[name]
        path, file = self._file_by_name[piece.stored]
        with _translated(path):
            tensor = file.get_tensor(piece.stored)
        return tensor if piece.matrix is None else tensor[piece.matrix, piece.start : piece.end]


@contextmanager
def open_tensors(checkpoint: Checkpoint) -> Iterator[TensorFiles]:
    """Open all files of a checkpoint.

    Cost:   no anonymous memory, because files are mapped and not copied.
    Errors: ConfigError naming the file if it is truncated or its header is broken, and the tensor if the file and the
            index disagree.
    """
    file_by_name: dict[str, tuple[Path, Any]] = {}
    with ExitStack() as files:
        for path, expected in checkpoint.shards:
            with _translated(path):
                file = files.enter_context(_open(path))
                names = file.keys()
            if expected is not None and expected != set(names):
                name = min(expected.symmetric_difference(names))
                where = "lacks it" if name in expected else "has it, the index does not"
                raise ConfigError("weights.bad_index", f"{path}: tensor {name}: the file {where}")
            file_by_name |= dict.fromkeys(names, (path, file))
        if not file_by_name:
            raise ConfigError("weights.none", f"{checkpoint.folder}: the weights have no tensors")
        yield TensorFiles(file_by_name)


def _open(path: Path) -> Any:  # Any: see TensorFiles
    check_file(path)  # safetensors calls every file that it cannot open missing
    return open_model_file(path) if path.suffix == SUFFIX else safe_open(path, framework="pt", device="cpu")


def stream_tensors(checkpoint: Checkpoint) -> Iterator[tuple[Path, str, Tensor]]:
    """Yield file, name and tensor, one at a time. A tensor is a view of its file, valid until the next one.

    Cost and errors: see `open_tensors`.
    """
    with open_tensors(checkpoint) as tensors:
        for name in tensors:
            yield tensors.path(name), name, tensors.read(name)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except ModelFileError as exc:
        raise ConfigError(exc.code, str(exc)) from exc
    except OSError as exc:
        raise ConfigError("weights.unreadable", f"{path}: cannot be read: {exc.strerror or exc}") from exc
    except SafetensorError as exc:
        raise ConfigError("weights.broken", f"{path}: not a whole file of weights: {exc}") from exc


class ContentDigest:
    """A digest of 32 bytes over everything that was loaded: names, shapes, dtypes and content.

    It does not protect against forgery. Content enters as weighted sums of 64-bit words with odd weights, one sum per
    MiB. Any single change shows, at the speed of memory (about 5 GB/s per core; SHA-256 reaches 1).
    """

    def __init__(self, facts: Facts | None = None) -> None:
        """`facts`: what else the digest is to change with. Errors: as `canonical`."""
        self._digest_by_name: dict[str, bytes] = {}
        self._facts = canonical(facts or {})
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
        digest = hashlib.sha256(self._facts)
        for name in sorted(self._digest_by_name):
            digest.update(self._digest_by_name[name])
        return digest.digest()


Rename = Callable[[TensorFiles], TensorFiles]
"""Returns the tensors of a checkpoint under the names of targets."""


class DeferredPart(Protocol):
    """A part of a model whose memory exists only while it is loaded."""

    @property
    def shown(self) -> Mapping[str, Tensor | QuantizedTarget]:
        """The targets of the part without memory."""
        ...

    def targets(self) -> Mapping[str, Tensor | QuantizedTarget]:
        """Return the targets, with memory."""
        ...

    def finish(self) -> None:
        """Take what was loaded, and free the memory of the targets."""
        ...


def load_weights(
    targets: Mapping[str, Tensor | QuantizedTarget],
    checkpoint: Checkpoint,
    digest: ContentDigest,
    progress: Progress | None,
    skipped: tuple[str, ...] = (),
    rename: Rename | None = None,
    parts: Sequence[DeferredPart] = (),
) -> None:
    """Copy every tensor of a checkpoint to its target, cast to the target's dtype; quantised layers take theirs.

    `skipped`: endings of names of tensors that are not read. `rename`: gives stored tensors the names of targets.
    `parts`: are loaded behind the targets, one after the other.

    Cost:   one read of the files; beside the targets, the memory of one quantised layer.
    Errors: ConfigError naming file and tensor if a tensor is missing, has no target, has another shape or cannot be
            read.
    """
    known = dict(targets)
    for part in parts:
        known |= part.shown
    total = sum(target.nbytes for target in known.values())
    with open_tensors(checkpoint) as files:
        tensors = files if rename is None else rename(files)
        names_by_target = {name: _names_of(name, target, tensors, known) for name, target in known.items()}
        _refuse_missing(known, names_by_target, tensors)
        _refuse_extra(names_by_target, tensors, skipped)
        loader = _Loader(tensors, names_by_target, digest, progress, total)
        loader.load(targets)
        for part in parts:
            loader.load(part.targets())
            part.finish()


class _Loader:
    """Loads targets one after the other, and tells how far it is."""

    def __init__(
        self,
        tensors: TensorFiles,
        names_by_target: Mapping[str, Mapping[str, str]],
        digest: ContentDigest,
        progress: Progress | None,
        total: int,
    ) -> None:
        self._tensors = tensors
        self._names_by_target = names_by_target
        self._digest = digest
        self._progress = progress
        self._total = total
        self._loaded = 0
        self._unpacked = 0

    def load(self, targets: Mapping[str, Tensor | QuantizedTarget]) -> None:
        """Load some of the targets. Errors: see `load_weights`."""
        tensors = self._tensors
        for name, target in targets.items():
            names = self._names_by_target[name]
            found = {role: tensors.read(stored) for role, stored in names.items()}
            if isinstance(target, Tensor):
                _check_float(tensors.path(name), name, found["weight"], target)
                target.copy_(found["weight"])
            else:
                _load_layer(target, names, found, tensors)
                self._unpacked += target.shape[0] * target.shape[1]
                if self._unpacked > _UNPACKED_BYTES:
                    return_freed_memory()
                    self._unpacked = 0
            for role, tensor in found.items():
                self._digest.add(names[role], tensor)
            self._loaded += target.nbytes
            if self._progress is not None:
                self._progress(self._loaded, max(self._loaded, self._total))


def _names_of(
    name: str, target: Tensor | QuantizedTarget, tensors: "TensorFiles", targets: Mapping[str, object]
) -> dict[str, str]:
    """Return the names of the checkpoint's tensors that a target takes, by their role in it."""
    if isinstance(target, Tensor):
        return {"weight": name} if name in tensors else {}
    roles = roles_of(target.tensors, name, tensors)
    return {role: stored for role, stored in roles.items() if stored not in targets}


def _refuse_missing(
    targets: Mapping[str, Tensor | QuantizedTarget], found: Mapping[str, Mapping[str, str]], tensors: "TensorFiles"
) -> None:
    missing: list[str] = []
    for name, target in targets.items():
        if isinstance(target, Tensor):
            missing += [] if found[name] else [name]
            continue
        for role, stored in target.tensors.items():
            if role not in found[name] and not stored.is_optional:
                missing.append(f"{name}.{stored.names[0]}")
    if missing:
        more = f", and {len(missing) - 1} more"
        raise ConfigError("weights.missing", f"{tensors.last_path}: tensor {min(missing)} is missing{more}")


def _refuse_extra(found: Mapping[str, Mapping[str, str]], tensors: "TensorFiles", skipped: tuple[str, ...]) -> None:
    taken = {stored for roles in found.values() for stored in roles.values()}
    for name in tensors:
        # Derived from the config, not used, or tied to the embedding.
        if name in taken or name.endswith(_DERIVED) or name == "lm_head.weight" or name.endswith(skipped):
            continue
        path = tensors.path(name)
        raise ConfigError("weights.extra_tensor", f"{path}: tensor {name}: this architecture has no such tensor")


def _check_float(path: Path, name: str, tensor: Tensor, target: Tensor) -> None:
    if tensor.shape != target.shape:
        raise ConfigError(
            "weights.shape", f"{path}: tensor {name}: shape {list(tensor.shape)}, not {list(target.shape)}"
        )
    if not tensor.is_floating_point() or tensor.itemsize < 2:  # a number of 8 bits has no meaning without its scale
        shown = f"dtype {tensor.dtype} is not a floating-point type of 16 or more bits"
        raise ConfigError("weights.dtype", f"{path}: tensor {name}: {shown}")


def _load_layer(
    target: QuantizedTarget, names: Mapping[str, str], found: Mapping[str, Tensor], tensors: "TensorFiles"
) -> None:
    for role, tensor in found.items():
        stored, name = target.tensors[role], names[role]
        if tuple(tensor.shape) not in stored.shapes:
            expected = " or ".join(str(list(shape)) for shape in stored.shapes)
            shown = f"shape {list(tensor.shape)}, not {expected}"
            raise ConfigError("weights.shape", f"{tensors.path(name)}: tensor {name}: {shown}")
        if tensor.dtype not in stored.dtypes:
            expected = " or ".join(str(dtype) for dtype in stored.dtypes)
            shown = f"dtype {tensor.dtype}, not {expected}"
            raise ConfigError("weights.dtype", f"{tensors.path(name)}: tensor {name}: {shown}")
    try:
        target.load(found)
    except WrongTensorError as exc:
        name = names[exc.role]
        raise ConfigError("weights.wrong", f"{tensors.path(name)}: tensor {name}: {exc.reason}") from exc


def fill_dummy(
    targets: Mapping[str, Tensor | QuantizedTarget],
    seed: int,
    std: float = 0.02,
    parts: Sequence[DeferredPart] = (),
) -> None:
    """Draw normal weights with this deviation, and set norms to 1. Reproducible for a seed, shapes and a dtype.

    `parts`: see `load_weights`; they get the numbers that they would get among the targets.
    """
    names = sorted([*targets, *(name for part in parts for name in part.shown)])
    index_by_name = {name: index for index, name in enumerate(names)}
    _draw(targets, index_by_name, seed, std)
    for part in parts:
        _draw(part.targets(), index_by_name, seed, std)
        part.finish()


def _draw(
    targets: Mapping[str, Tensor | QuantizedTarget], index_by_name: Mapping[str, int], seed: int, std: float
) -> None:
    for name, target in targets.items():
        index = index_by_name[name]
        if isinstance(target, QuantizedTarget):
            target.draw(std, torch.Generator().manual_seed(seed * 1_000_003 + index))
            continue
        if name.endswith("norm.weight"):
            target.fill_(1.0)
            continue
        generator = torch.Generator(device=target.device).manual_seed(seed * 1_000_003 + index)
        target.normal_(0.0, std, generator=generator)

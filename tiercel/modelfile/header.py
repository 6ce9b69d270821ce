"""Read the header of a GGUF file: its metadata, and where its tensors are. Nothing in the file is trusted.

Source: the specification of GGUF, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tiercel.modelfile.errors import ModelFileError

MetadataValue = int | float | bool | str | tuple[int, ...] | tuple[float, ...] | tuple[bool, ...] | tuple[str, ...]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_NAME = 65535  # bytes of a key; the specification's limit
_MAX_HEADER = 64 << 20  # bytes; a vocabulary of 250,000 tokens with its merges takes less than 20 MiB
_MAX_ENTRIES = 1 << 22  # of all lists together; they bound the memory, whatever the size of the file
_MAX_DIMENSIONS = 4
_ALIGNMENT = 32  # bytes, where the file does not tell
_MAX_ALIGNMENT = 1 << 20
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]


@dataclass(frozen=True, slots=True)
class BlockType:
    """The storage of a tensor: blocks of neighbouring numbers of a row."""

    name: str
    numbers: int  # of a block
    nbytes: int

    @property
    def is_float(self) -> bool:
        """Whether numbers are stored one by one as floating-point numbers."""
        return self.numbers == 1


BLOCK_TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    30: BlockType("BF16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
}
"""The types of tensors that are read, by their number in the file."""

_OTHER_TYPES = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of the file. `shape` is in torch's order, the outermost dimension first."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int  # bytes from the start of the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class ModelFile:
    """The header of a GGUF file."""

    path: Path
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, FileTensor]


def read_header(path: Path) -> ModelFile:
    """Read metadata and the table of tensors.

    Cost:   less than a second for a vocabulary of 150,000 tokens; tensors are not read.
    Errors: ModelFileError naming the file, and the key or tensor, if the file cannot be read, is no GGUF file of a
            known version, ends early, claims more than it has, or stores a tensor in a type that is not supported.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Cursor(path, content).read_file()
    except OSError as exc:
        raise ModelFileError("weights.unreadable", f"{path}: cannot be read: {exc.strerror or exc}") from exc
    except ValueError as exc:  # of an empty file
        raise ModelFileError("weights.broken", f"{path}: not a readable GGUF file: {exc}") from exc


class _Cursor:
    """A position in the header. Every length that the file claims is compared with what is left of it."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._place = 0
        self._entries = 0  # of lists so far

    def read_file(self) -> ModelFile:
        if self._take(4, "the magic bytes") != _MAGIC:
            raise self._broken("it does not begin with GGUF")
        version = self._number(_U32, "version")
        if version not in _VERSIONS:
            order = "; a file for big-endian machines" if version & 0xFFFF == 0 else ""
            raise self._broken(f"version {version} is not supported, only 2 and 3{order}")
        tensors = self._count("tensor_count", 24)
        pairs = self._count("metadata_kv_count", 13)
        metadata: dict[str, MetadataValue] = {}
        for index in range(pairs):
            key = self._string(f"the key of metadata entry {index:,}", _MAX_NAME)
            if key in metadata:
                raise self._broken(f"metadata {key:.200} is given twice")
            metadata[key] = self._value(key)
        table: dict[str, tuple[tuple[int, ...], BlockType, int]] = {}
        for index in range(tensors):
            name = self._string(f"the name of tensor {index:,}", _MAX_NAME)
            if name in table:
                raise self._broken(f"tensor {name:.200} is given twice")
            table[name] = self._tensor(name)
        return ModelFile(self._path, metadata, self._place_tensors(table, metadata))

    def _place_tensors(
        self, table: Mapping[str, tuple[tuple[int, ...], BlockType, int]], metadata: Mapping[str, MetadataValue]
    ) -> dict[str, FileTensor]:
        """Return the tensors with their places. The data begin at the next multiple of the alignment."""
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or not 8 <= alignment <= _MAX_ALIGNMENT or alignment % 8:
            limits = f"must be a multiple of 8 from 8 to {_MAX_ALIGNMENT:,}"
            raise self._broken(f"metadata general.alignment {limits}, not {alignment!r:.80}")
        start = -(-self._place // alignment) * alignment
        placed: dict[str, FileTensor] = {}
        for name, (shape, kind, offset) in table.items():
            nbytes = math.prod(shape) // kind.numbers * kind.nbytes
            if offset % alignment:
                raise self._broken(f"tensor {name:.200}: offset {offset:,} is no multiple of {alignment}")
            if start + offset + nbytes > len(self._content):
                has = f"the file has {len(self._content):,} bytes, the tensor ends at {start + offset + nbytes:,}"
                raise self._broken(f"tensor {name:.200}, shape {list(shape)}, {kind.name}: {has}: it is truncated")
            placed[name] = FileTensor(name, shape, kind, start + offset, nbytes)
        self._refuse_overlaps(placed)
        return placed

    def _refuse_overlaps(self, placed: Mapping[str, FileTensor]) -> None:
        in_order = sorted(placed.values(), key=lambda tensor: tensor.offset)
        for one, following in pairwise(in_order):
            if one.offset + one.nbytes > following.offset:
                raise self._broken(f"tensor {following.name:.200} begins before tensor {one.name:.200} ends")

    def _tensor(self, name: str) -> tuple[tuple[int, ...], BlockType, int]:
        shown = f"tensor {name:.200}"
        dimensions = self._number(_U32, f"{shown}: the number of dimensions")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._broken(f"{shown}: {dimensions:,} dimensions, expected 1 to {_MAX_DIMENSIONS}")
        shape = tuple(self._number(_U64, f"{shown}: shape") for _ in range(dimensions))[::-1]
        number, offset = self._number(_U32, f"{shown}: type"), self._number(_U64, f"{shown}: offset")
        kind = BLOCK_TYPES.get(number)
        if kind is None:
            known = ", ".join(one.name for one in BLOCK_TYPES.values())
            asked = _OTHER_TYPES.get(number, f"number {number}")
            raise ModelFileError(
                "weights.format", f"{self._path}: {shown}: type {asked} is not supported; known: {known}"
            )
        if not all(shape):
            raise self._broken(f"{shown}: shape {list(shape)} has no numbers")
        if shape[-1] % kind.numbers:
            raise self._broken(f"{shown}: {kind.name} has blocks of {kind.numbers} numbers, a row has {shape[-1]:,}")
        return shape, kind, offset

    def _value(self, key: str) -> MetadataValue:
        shown = f"metadata {key:.200}"
        kind = self._number(_U32, f"{shown}: type")
        if kind == _STRING:
            return self._string(shown)
        if kind in _SCALARS:
            return self._number(_SCALARS[kind], shown)
        if kind != _ARRAY:
            raise self._broken(f"{shown}: there is no type {kind:,}")
        kind = self._number(_U32, f"{shown}: type of elements")
        if kind == _STRING:
            return tuple(self._string(shown) for _ in range(self._length(shown, 8)))
        if kind not in _SCALARS:
            raise self._broken(f"{shown}: an array of type {kind:,} is not supported")
        form = _SCALARS[kind]
        count = self._length(shown, form.size)
        raw = self._take(count * form.size, shown)
        return tuple(one for (one,) in form.iter_unpack(raw))

    def _length(self, shown: str, least_bytes: int) -> int:
        """Return the number of entries of a list."""
        count = self._count(f"{shown}: length", least_bytes)
        self._entries += count
        if self._entries > _MAX_ENTRIES:
            raise self._broken(f"{shown}: all lists have more than {_MAX_ENTRIES:,} entries")
        return count

    def _count(self, what: str, least_bytes: int) -> int:
        """Return a number of things that take at least so many bytes each."""
        count, left = self._number(_U64, what), len(self._content) - self._place
        if count * least_bytes > left:
            raise self._broken(f"{what} is {count:,}, but only {left:,} bytes follow")
        return count

    def _number(self, form: struct.Struct, what: str) -> int:
        return form.unpack(self._take(form.size, what))[0]

    def _string(self, what: str, most: int | None = None) -> str:
        length = self._count(f"{what}: length", 1)
        if most is not None and length > most:
            raise self._broken(f"{what} has {length:,} bytes, at most {most:,} are allowed")
        raw = self._take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as exc:
            raise self._broken(f"{what} is not UTF-8") from exc

    def _take(self, count: int, what: str) -> bytes:
        end = self._place + count
        if end > len(self._content):
            raise self._broken(f"it ends at byte {len(self._content):,}, in {what}")
        if end > _MAX_HEADER:
            raise self._broken(f"the header has more than {_MAX_HEADER:,} bytes, in {what}")
        raw = self._content[self._place : end]
        self._place = end
        return raw

    def _broken(self, reason: str) -> ModelFileError:
        return ModelFileError("weights.broken", f"{self._path}: not a whole GGUF file: {reason}")

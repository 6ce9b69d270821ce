"""The header of GGUF files: what the `gguf` package writes is read, and what is broken is refused by name."""

import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.seeds import fresh_seeds
from tiercel.modelfile.errors import ModelFileError
from tiercel.modelfile.header import BLOCK_TYPES, read_header

U32, U64, STRING, ARRAY, U8 = 4, 10, 8, 9, 0


def text(value: str) -> bytes:
    """Return a string as the file has it."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    """Return a metadata entry."""
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """Return an entry of the table of tensors. `shape` is in the file's order, the innermost dimension first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def whole(pairs: list[bytes], tensors: list[bytes], data: int = 0, version: int = 3) -> bytes:
    """Return a file with these entries and `data` bytes of zeros after the padding."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + bytes(data)


def write_random(path: Path, rng: random.Random) -> dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]:
    """Write a file with a tensor of every type, in a random order; return the raw tensors."""
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(rng.randrange(1, 99))
    writer.add_rope_freq_base(1e6)
    writer.add_token_list([f"tök{i}" for i in range(rng.randrange(1, 50))])
    writer.add_token_scores([rng.random() for _ in range(9)])
    writer.add_bool("a.flag", True)
    writer.add_custom_alignment(rng.choice([32, 64]))
    raw: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] = {}
    numbers = np.random.default_rng(rng.randrange(1 << 30))
    for number, kind in rng.sample(sorted(BLOCK_TYPES.items()), len(BLOCK_TYPES)):
        rows, blocks = rng.randrange(1, 5), rng.randrange(1, 4)
        asked = gguf.GGMLQuantizationType(number)
        if kind.is_float and kind.name != "BF16":
            content = numbers.standard_normal((rows, blocks)).astype(np.float32 if kind.nbytes == 4 else np.float16)
        else:
            content = numbers.integers(0, 256, (rows, blocks * kind.nbytes), dtype=np.uint8)
        writer.add_tensor(f"t.{kind.name}", content, raw_dtype=asked)
        raw[f"t.{kind.name}"] = (content, asked)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return raw


@pytest.mark.parametrize("seed", [1, 2, 3, *fresh_seeds(1)])
def test_what_the_gguf_package_writes_is_read(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "model.gguf"
    raw = write_random(path, random.Random(seed))
    found, content = read_header(path), path.read_bytes()
    assert set(found.tensors) == set(raw)
    for name, (array, kind) in raw.items():
        one = found.tensors[name]
        assert content[one.offset : one.offset + one.nbytes] == array.tobytes(), name
        assert one.type.name == kind.name
        assert (one.type.numbers, one.type.nbytes) == gguf.GGML_QUANT_SIZES[kind]
    reader = gguf.GGUFReader(path)
    assert {one.name: tuple(int(size) for size in one.shape[::-1]) for one in reader.tensors} == {
        name: one.shape for name, one in found.tensors.items()
    }
    for key, value in found.metadata.items():
        field = reader.fields[key].contents()
        assert (tuple(field) if isinstance(field, list) else field) == value, key


ENOUGH = 4 * 32
HOSTILE = {
    "an empty file": (b"", "GGUF"),
    "another file": (b"PK\3\4" + bytes(64), "does not begin with GGUF"),
    "an unknown version": (whole([], [], version=9), "version 9"),
    "another byte order": (b"GGUF" + struct.pack(">I", 3) + bytes(64), "big-endian"),
    "absurd tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 62, 0), "tensor_count"),
    "absurd metadata": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 62), "metadata_kv_count"),
    "an absurd list": (whole([pair("a.b", ARRAY, struct.pack("<IQ", U32, 1 << 60))], [], 64), "metadata a.b: length"),
    "an absurd string": (whole([pair("a.b", STRING, struct.pack("<Q", 1 << 60))], [], 64), "metadata a.b: length"),
    "a long key": (whole([text("k" * 70_000)], [], 64), "at most 65,535"),
    "an unknown type of metadata": (whole([pair("a.b", 77, bytes(8))], []), "metadata a.b: there is no type 77"),
    "a list of lists": (whole([pair("a.b", ARRAY, struct.pack("<IQ", ARRAY, 1))], [], 64), "a.b: an array of type 9"),
    "no UTF-8": (whole([pair("a.b", STRING, struct.pack("<Q", 2) + b"\xff\xfe")], []), "metadata a.b is not UTF-8"),
    "a key twice": (whole([pair("a.b", U32, bytes(4))] * 2, []), "a.b is given twice"),
    "a tensor twice": (whole([], [tensor("x", (8,))] * 2, 64), "tensor x is given twice"),
    "an unknown type": (whole([], [tensor("x", (8,), 99)], 64), "tensor x: type number 99 is not supported"),
    "a type that is not read": (whole([], [tensor("x", (256,), 10)], 640), "tensor x: type Q2_K is not supported"),
    "no dimensions": (whole([], [tensor("x", ())], 64), "tensor x: 0 dimensions"),
    "many dimensions": (whole([], [tensor("x", (1,) * 9)], 64), "tensor x: 9 dimensions"),
    "an empty tensor": (whole([], [tensor("x", (8, 0))], 64), "has no numbers"),
    "half a block": (whole([], [tensor("x", (33, 2), 8)], 640), "tensor x: Q8_0 has blocks of 32 numbers"),
    "an absurd shape": (whole([], [tensor("x", (1 << 62, 1 << 62))], 64), "it is truncated"),
    "an offset out of range": (whole([], [tensor("x", (8,), 0, 1 << 40)], 64), "tensor x, shape [8], F32"),
    "a crooked offset": (whole([], [tensor("x", (8,), 0, 7)], 64), "offset 7 is no multiple of 32"),
    "overlapping tensors": (
        whole([], [tensor("x", (32,)), tensor("y", (8,), 0, 64)], ENOUGH),
        "tensor y begins before tensor x ends",
    ),
    "a crooked alignment": (
        whole([pair("general.alignment", U32, struct.pack("<I", 7))], [], 64),
        "metadata general.alignment must be a multiple of 8",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_by_name_in_flat_memory(tmp_path: Path, case: str) -> None:
    content, expected = HOSTILE[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError) as caught:
            read_header(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert expected in str(caught.value)
    assert peak < 2 << 20


def test_lists_of_a_large_file_do_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair("a.b", ARRAY, struct.pack("<IQ", U8, 1 << 30)))
        file.truncate(2 << 30)  # sparse
    with pytest.raises(ModelFileError, match=r"metadata a\.b: all lists have more than 4,194,304 entries"):
        read_header(path)
    with path.open("r+b") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair("a.b", STRING, struct.pack("<Q", 1 << 30)))
    with pytest.raises(ModelFileError, match=r"the header has more than 67,108,864 bytes, in metadata a\.b"):
        read_header(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    pairs = [pair("a.b", STRING, text("value")), pair("a.c", ARRAY, struct.pack("<IQ3I", U32, 3, 1, 2, 3))]
    content = whole(pairs, [tensor("x", (8,))], 32)
    path.write_bytes(content)
    assert read_header(path).metadata == {"a.b": "value", "a.c": (1, 2, 3)}
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ModelFileError, match=r"model\.gguf"):
            read_header(path)


@pytest.mark.parametrize("seed", [1, 2, *fresh_seeds(1)])
def test_changed_bytes_are_read_or_refused(tmp_path: Path, seed: int) -> None:
    rng, path = random.Random(seed), tmp_path / "model.gguf"
    write_random(path, rng)
    content = path.read_bytes()
    refused = 0
    for _ in range(200):
        changed = bytearray(content)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(600)] = rng.randrange(256)
        path.write_bytes(changed)
        try:
            read_header(path)
        except ModelFileError:
            refused += 1
    assert refused > 0, seed

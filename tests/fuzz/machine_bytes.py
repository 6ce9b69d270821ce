"""Fuzz targets: frames between the processes, files of the SSD tier, shared memory, and answers that a client reads."""

import asyncio
import contextlib
import os
import random
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import xxhash

from tests.fuzz.mutator import cut, mutate_bytes, mutate_integer, mutator_of
from tests.fuzz.target import Target
from tiercel.device.journal_format import RECORD_BYTES, pack_clean, pack_journal_head, pack_record, replay_journal
from tiercel.device.volume import open_volume
from tiercel.device.volume_format import (
    ALIGN,
    JOURNAL_NAME,
    VOLUME_NAME,
    Superblock,
    digest_of,
    find_digest,
    pack_header,
    pack_superblock,
    parse_header,
    parse_superblock,
)
from tiercel.device.volume_survey import view_folder
from tiercel.kvcache.store.journal import SlotJournal
from tiercel.kvcache.store.memory_file import kept_blocks, layout_of, map_memory
from tiercel.loadtest.client.connection import Connection, ProtocolFault, StaleConnectionError
from tiercel.loadtest.client.sse import EventReader, decode_event, error_message
from tiercel.values.errors import ConfigError, WireError
from tiercel.values.ids import BlockKey, SeqId
from tiercel.values.outcome import FinishReason, Gauges
from tiercel.values.request import Request, SamplingParams, pack_tokens
from tiercel.values.tier import KVSpec
from tiercel.wire.frames import Abort, FrameReader, FromEngine, Quit, Report, Submit, ToEngine, encode_frame

_BLOCK, _CAPACITY, _KIND, _ID, _KEY = 8192, 1 << 18, b"model and layout", b"sixteen bytes id", b"k" * 32
_SPEC = KVSpec(layers=1, kv_heads=1, head_dim=8, block_size=4, dtype="float32")
_REQUEST = Request(
    id=SeqId(7), prompt=pack_tokens(range(9)), params=SamplingParams(logit_bias=((1, 0.5),)), arrival_s=1.0
)
_INTEGERS = mutator_of(mutate_bytes, mutate_integer)


# ---- frames


def _mutate_frame(rng: random.Random, text: bytes) -> bytes:
    """Change a frame, and mostly make its length right again, so that the body is decoded."""
    changed = _INTEGERS(rng, text)
    if rng.random() < 0.7 and len(changed) > 4:
        changed = (len(changed) - 4).to_bytes(4, "little") + changed[4:]
    return changed


def _read_frames(union: Any) -> Callable[[bytes, random.Random], None]:  # Any: a union of structs is no type
    def parse(text: bytes, rng: random.Random) -> None:
        reader = FrameReader(union)
        for piece in cut(rng, text):
            reader.feed(piece)

    return parse


# ---- the SSD tier


def _sealed(text: bytes) -> bytes:
    """Return a page with the right checksum, so that the fields behind it are looked at."""
    page = text.ljust(ALIGN, b"\0")[: ALIGN - 8]
    return page + xxhash.xxh3_64_intdigest(page).to_bytes(8, "little")


def _mutate_page(rng: random.Random, text: bytes) -> bytes:
    changed = mutate_integer(rng, text[:256]) + text[256:] if rng.random() < 0.7 else mutate_bytes(rng, text)
    return _sealed(changed) if rng.random() < 0.8 else changed


def _read_header(text: bytes, rng: random.Random) -> None:
    page = memoryview(text)
    parse_header(page)
    if len(text) >= ALIGN:
        find_digest(page, _ID, 3, _BLOCK, _KEY)


def _mutate_journal(rng: random.Random, text: bytes) -> bytes:
    """Change a journal, and mostly make the check of the changed record right again."""
    changed = bytearray(_INTEGERS(rng, text))
    if rng.random() < 0.7 and len(changed) >= 2 * RECORD_BYTES:
        at = rng.randrange(1, len(changed) // RECORD_BYTES) * RECORD_BYTES
        body = mutate_integer(rng, bytes(changed[at : at + RECORD_BYTES - 4]))
        changed[at : at + RECORD_BYTES] = body + zlib.crc32(body, zlib.crc32(_ID)).to_bytes(4, "little")
    return bytes(changed)


def _read_journal(text: bytes, rng: random.Random) -> None:
    replay = replay_journal(text, _ID, 4)
    assert replay is None or len(replay.table) == 4 * RECORD_BYTES


_BLOCKS = {bytes([number]) * 32: bytes([number]) * _BLOCK for number in range(1, 6)}


def _volume_files() -> bytes:
    """Return the volume file, a page of zeros, and the journal of a small volume."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "kv"
        with open_volume((folder,), _CAPACITY, _BLOCK, _KIND) as volume:
            for slot, (key, block) in enumerate(_BLOCKS.items()):
                volume.write(slot, key, memoryview(block))
        content = (folder / VOLUME_NAME).read_bytes()
        return content[: ALIGN + 5 * (ALIGN + _BLOCK)] + (folder / JOURNAL_NAME).read_bytes().rstrip(b"\0")


def _mutate_volume(rng: random.Random, text: bytes) -> bytes:
    """Change the superblock, a header, a payload or the journal."""
    changed = bytearray(text)
    place = rng.randrange(3)
    if place == 0:
        changed[:ALIGN] = _mutate_page(rng, text[:ALIGN])[:ALIGN].ljust(ALIGN, b"\0")
    elif place == 1:
        at = ALIGN + rng.randrange(5) * (ALIGN + _BLOCK)
        changed[at : at + ALIGN] = _mutate_page(rng, text[at : at + ALIGN])[:ALIGN].ljust(ALIGN, b"\0")
    else:
        return (
            mutate_bytes(rng, text[-20_000:]) if place == 2 else bytes(text[:ALIGN]) + mutate_bytes(rng, text[ALIGN:])
        )
    return bytes(changed)


def _read_volume(text: bytes, rng: random.Random) -> None:
    """Open the volume and read its blocks: each is the one that was written, or a miss."""
    split = ALIGN + 5 * (ALIGN + _BLOCK)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "kv"
        folder.mkdir(mode=0o700)
        (folder / VOLUME_NAME).write_bytes(text[:split])
        (folder / JOURNAL_NAME).write_bytes(text[split:])
        (folder / VOLUME_NAME).chmod(0o600)
        if rng.random() < 0.5:
            os.truncate(folder / VOLUME_NAME, max(len(text[:split]), _CAPACITY))
        with contextlib.suppress(ConfigError), contextlib.ExitStack() as closing:
            view = view_folder(folder, closing)
            view.facts()
            view.check()
        into = memoryview(bytearray(_BLOCK))
        with open_volume((folder,), _CAPACITY, _BLOCK, _KIND) as volume:
            for slot, key in volume.recover():
                if volume.read(slot, key, into):
                    assert _BLOCKS.get(key) == bytes(into), "a wrong block was served"


# ---- memory that outlives an engine


def _kept_memory() -> bytes:
    file = os.memfd_create("fuzz")
    try:
        pages, _ = map_memory(file, layout_of(_SPEC, b"model", 4))
        journal = SlotJournal(memoryview(pages)[ALIGN : ALIGN + 4 * 64])
        journal.sign(1, BlockKey(b"a" * 32), b"d" * 16)  # type: ignore[arg-type]
        return bytes(pages[: 2 * ALIGN])
    finally:
        os.close(file)


def _read_kept_memory(text: bytes, rng: random.Random) -> None:
    file = os.memfd_create("fuzz")
    try:
        os.write(file, text)
        if rng.random() < 0.8:
            os.ftruncate(file, layout_of(_SPEC, b"model", 4).size_bytes)
        kept_blocks(file, _SPEC, b"model")
        pages, _ = map_memory(file, layout_of(_SPEC, b"model", 4))
        records = memoryview(pages)[ALIGN : ALIGN + 4 * 64]
        for slot, key in SlotJournal(records).records():
            assert 0 < slot < 4
            assert len(key) == 32
    finally:
        os.close(file)


# ---- answers of a server, as the load test reads them


class _SilentWire(asyncio.Transport):
    """A transport that sends nothing."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Drop the data."""

    def abort(self) -> None:
        """Do nothing."""


async def _receive(pieces: list[bytes]) -> None:
    connection = Connection(lambda: 0.0, set(), [])
    connection.connection_made(_SilentWire())
    body = connection.send(b"")
    body.listen(lambda at_s, piece: None)
    for piece in pieces:
        connection.data_received(piece)
    connection.connection_lost(None)
    await body.head
    await body.finished()


def _read_answer(text: bytes, rng: random.Random) -> None:
    asyncio.run(_receive(list(cut(rng, text))))


def _read_events(text: bytes, rng: random.Random) -> None:
    """Events are the same in pieces of any size."""
    whole = EventReader().feed(text)
    reader = EventReader()
    pieces = [event for piece in cut(rng, text) for event in reader.feed(piece)]
    assert pieces == whole
    for event in whole:
        try:
            decode_event(event)
        except msgspec.DecodeError:
            error_message(event)


_JOURNAL = b"".join(
    [pack_journal_head(_ID, 4), bytes(4 * RECORD_BYTES), pack_record(_ID, 1, _KEY, 1), pack_clean(_ID, 1)]
)
_SUPERBLOCK = Superblock(_ID, _KIND, _BLOCK, 8, 0, 1, 3, 5)
_EVENTS = (
    b': comment\n\ndata: {"choices": [{"delta": {"content": "a"}, "finish_reason": null}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\r\n\r\ndata: [DONE]\n\n'
)
_ANSWERS = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nX: y\r\n\r\nabc",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\nto the end",
)

TARGETS = (
    Target("frames_to_engine", (encode_frame(Submit(_REQUEST)), encode_frame(Abort((SeqId(7),))), encode_frame(Quit())),
           _read_frames(ToEngine), (WireError,), _mutate_frame),
    Target("frames_from_engine",
           (encode_frame(Report(seqs=bytes(8), tokens=bytes(4), gauges=Gauges())),
            encode_frame(Abort((SeqId(7),), FinishReason.STOP))),
           _read_frames(FromEngine), (WireError,), _mutate_frame),
    Target("superblock", (pack_superblock(_SUPERBLOCK), pack_superblock(replace(_SUPERBLOCK, stripes=2))),
           lambda text, rng: parse_superblock(memoryview(text)), (), _mutate_page),
    Target("slot_header", (pack_header(_ID, 3, 9, _BLOCK, _KEY, digest_of(b"x")),), _read_header, (), _mutate_page),
    Target("disk_journal", (_JOURNAL,), _read_journal, (), _mutate_journal),
    Target("volume", (_volume_files(),), _read_volume, (ConfigError,), _mutate_volume),
    Target("kept_memory", (_kept_memory(),), _read_kept_memory, (), _INTEGERS),
    Target("http_answer", _ANSWERS, _read_answer, (httpx.RemoteProtocolError, ProtocolFault, StaleConnectionError)),
    Target("events", (_EVENTS,), _read_events),
)  # fmt: skip

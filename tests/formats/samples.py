"""One sample of every format that outlives a process or that two processes must agree on, as bytes.

`python -m tests.formats.samples` records them in golden.json. It refuses to, with exit code 1, if bytes have changed
whose format has a version and the version has not been raised.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
from msgspec import Struct

from tests.wire.every_field import make, message_types
from tiercel.device import journal_format, volume_format
from tiercel.device.volume_format import Superblock
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.models.base import kv_spec
from tiercel.engine.models.registry import load_model
from tiercel.engine.models.weights import ContentDigest
from tiercel.kvcache.store import memory_file
from tiercel.kvcache.store.journal import RECORD_BYTES, SlotJournal
from tiercel.server.batch.line import LineAnswer
from tiercel.server.batch.records import BatchRecord, FileRecord
from tiercel.server.control import messages as control
from tiercel.settings.settings import EngineSettings
from tiercel.values.block_key import child_key, namespace_key
from tiercel.values.ids import BlockKey, SeqId, SlotId
from tiercel.values.plan import Slice
from tiercel.values.request import pack_tokens
from tiercel.wire import fleet_frames, frames, handshake, step_record

GOLDEN = Path(__file__).with_name("golden.json")

DENSE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
MIXTURE = DENSE | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
    "sliding_window": 64, "tie_word_embeddings": False,
}  # fmt: skip

_SECRET, _NONCE, _IDENTITY = b"secret of sixteen", bytes(range(16)), bytes(range(16, 32))
_KEY, _DIGEST = BlockKey(bytes(range(32))), bytes(range(16))


class Format(Struct, frozen=True):
    """A group of samples. `version`: what one side tells the other, or a file says of itself; None: nothing."""

    version: int | None
    samples: Callable[[], Mapping[str, bytes]]


def _frames(union: Any, encode: Callable[[Any], bytes]) -> dict[str, bytes]:  # Any: a union is no type
    return {kind.__name__: encode(make(kind)) for kind in message_types(union)}


def _engine_wire() -> dict[str, bytes]:
    return _frames(frames.ToEngine, frames.encode_frame) | _frames(frames.FromEngine, frames.encode_frame)


def _fleet_wire() -> dict[str, bytes]:
    def encode(message: Any) -> bytes:
        return fleet_frames.frame_of(message, epoch=7)

    return _frames(fleet_frames.FrontFrame, encode) | _frames(fleet_frames.HostFrame, encode)


def _handshake() -> dict[str, bytes]:
    host = handshake.HostHandshake(_SECRET, _NONCE)
    front = handshake.FrontHandshake(_SECRET, _IDENTITY, _NONCE[::-1])
    hello = front.answer(host.challenge)
    return {
        "challenge": host.challenge,
        "hello": hello,
        "accepted": host.judge(hello).reply,
        "full": host.judge(hello, is_full=True).reply,
    }


def _control() -> dict[str, bytes]:
    return _frames(control.Message, control.encode)


def _batch() -> dict[str, bytes]:
    return {
        "answer": LineAnswer("id", "custom", error=None).encode(),
        "batch": msgspec.json.encode(make(BatchRecord)),
        "file": msgspec.json.encode(make(FileRecord)),
    }


def _volume() -> dict[str, bytes]:
    block = Superblock(_NONCE, b"fingerprint", block_bytes=8192, slots=5, stripe=1, stripes=2, opens=3, created_ns=4)
    header = volume_format.pack_header(_NONCE, slot=3, sequence=9, length=8192, key=_KEY, digest=_DIGEST)
    return {
        "superblock": volume_format.pack_superblock(block),
        "slot header": header,
        "journal head": journal_format.pack_journal_head(_NONCE, 5),
        "journal record": journal_format.pack_record(_NONCE, 3, _KEY, 9),
        "journal end": journal_format.pack_clean(_NONCE, 1),
    }


def _memory() -> dict[str, bytes]:
    records = bytearray(2 * RECORD_BYTES)
    SlotJournal(memoryview(records)).sign(SlotId(1), _KEY, _DIGEST)
    return {"header": memory_file.pack_header(memory_file.MemoryLayout(5, 8192, _KEY)), "record": bytes(records)}


def _step_record() -> dict[str, bytes]:
    fd = os.memfd_create("record")
    try:
        record = step_record.StepRecord.open(2, fd)
        record.enter(SeqId(9))
        record.allow(2.5)
        record.compile(SeqId(8))
        record.launch(7, [Slice(SeqId(1), 10, 5, samples=True), Slice(SeqId(2), 0, 3, samples=False)])
        return {"of two sequences": os.pread(fd, 4096, 0)}
    finally:
        os.close(fd)


def _identities() -> dict[str, bytes]:
    samples: dict[str, bytes] = {}
    for name, config in (("dense", DENSE), ("mixture", MIXTURE)):
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            settings = EngineSettings(model=folder, dtype="float32", load_format="dummy", seed=3)
            model = load_model(settings, torch.device("cpu"), SdpaAttention())
        identity = memory_file.identity_of(kv_spec(model, 16), model.fingerprint)
        root = namespace_key(identity, b"scope")
        samples |= {
            f"{name} fingerprint": model.fingerprint,
            f"{name} identity": identity,
            f"{name} first block key": child_key(root, pack_tokens(range(16))),
        }
    digest = ContentDigest({"config": "one"})
    digest.add("weight", torch.arange(1000, dtype=torch.float32).reshape(10, 100))
    return samples | {"content of a checkpoint": digest.finish()}


FORMATS: Mapping[str, Format] = {
    "engine wire": Format(None, _engine_wire),  # both processes are of one installation
    "fleet wire": Format(handshake.VERSION, _fleet_wire),
    "handshake": Format(handshake.VERSION, _handshake),
    "control socket": Format(control.VERSION, _control),
    "batches": Format(None, _batch),
    "volume": Format(volume_format.FORMAT_VERSION, _volume),
    "memory": Format(memory_file.VERSION, _memory),
    "step record": Format(None, _step_record),
    "identities": Format(None, _identities),
}


class Recorded(Struct, frozen=True):
    """The samples of one format as they were recorded, in hexadecimal, without the zeros at their ends."""

    version: int | None
    samples: dict[str, str]

    def sample(self, name: str) -> bytes:
        """Return the bytes of a sample without the zeros at its end."""
        return bytes.fromhex(self.samples[name])


def read_golden() -> dict[str, Recorded]:
    """Return what was recorded."""
    return msgspec.json.decode(GOLDEN.read_bytes(), type=dict[str, Recorded])


def record(found: Format) -> Recorded:
    """Return the samples of a format as golden.json holds them."""
    return Recorded(found.version, {name: raw.rstrip(b"\0").hex() for name, raw in sorted(found.samples().items())})


def is_silent_change(old: Recorded, new: Recorded) -> bool:
    """Whether bytes have changed and the version that would tell so has not."""
    if old.version is None or new.version is None:
        return False
    changed = any(old.samples[name] != new.samples[name] for name in old.samples.keys() & new.samples.keys())
    return (changed or old.samples.keys() > new.samples.keys()) and new.version <= old.version


def main() -> int:
    """Record all samples. Return 1 if a format has changed and its version has not."""
    old = read_golden() if GOLDEN.exists() else {}
    new = {name: record(found) for name, found in FORMATS.items()}
    silent = [name for name in old.keys() & new.keys() if is_silent_change(old[name], new[name])]
    for name in silent:
        print(f"{name}: the bytes have changed, so its version must be higher than {old[name].version}")
    if not silent:
        GOLDEN.write_text(json.dumps(msgspec.to_builtins(new), indent=1) + "\n", encoding="ascii")
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())

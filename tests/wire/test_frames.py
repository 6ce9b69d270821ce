"""Encoding of messages between server and engine."""

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.settings.settings import EngineSettings
from tiercel.values.errors import WireError
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import Finished, FinishReason, Gauges, TokenLogprobs
from tiercel.values.request import Request, SamplingParams, pack_tokens
from tiercel.values.tenant import KvQuota, Slo, Tenants, TenantShare
from tiercel.wire.frames import (
    MAX_FRAME_BYTES,
    Abort,
    Failed,
    FrameReader,
    FromEngine,
    Loading,
    Quit,
    Ready,
    Report,
    SetSettings,
    SetTenants,
    Start,
    Submit,
    ToEngine,
    encode_frame,
)

PARAMS = SamplingParams(temperature=0.5, logit_bias=((3, -1.5),), seed=2**63 - 1, stop_token_ids=(2, 7), logprobs=3)
REQUEST = Request(id=SeqId(2**53), prompt=pack_tokens([1, 2**32 - 1]), params=PARAMS, arrival_s=12.5, scope=b"\x00\xff")
TO_ENGINE: list[ToEngine] = [
    Start(EngineSettings(model="folder", max_model_len=128)),
    Submit(REQUEST),
    Abort((SeqId(1), SeqId(2)), FinishReason.STOP),
    SetSettings(3, EngineSettings(model="folder", scheduling_policy="priority")),
    SetTenants(
        Tenants(
            3,
            (
                TenantShare(name=TenantId("a"), weight=2.5, band=1, slo=Slo(kind="batch", ttft_s=0.5), group="g"),
                TenantShare(name=TenantId("b"), kv_quota=KvQuota(hbm=1, ssd=2**40)),
            ),
        )
    ),
    Quit(),
]
FROM_ENGINE: list[FromEngine] = [
    Loading("weights"),
    Ready(
        max_model_len=4096,
        vocab_size=512,
        block_size=16,
        blocks_total=100,
        dtype="float32",
        kv_dtype="float32",
        device="cpu",
        model_impl="native",
        weights_bytes=7,
        kv_bytes=8,
        load_s=0.5,
    ),
    Failed("model.not_found", "no such folder"),
    Report(
        seqs=struct.pack("<Q", 9),
        tokens=pack_tokens([4]),
        logprobs=(TokenLogprobs(SeqId(9), 4, -0.5, 1, (4, 5), (-0.5, -2.0)),),
        finished=(
            Finished(seq=SeqId(9), reason=FinishReason.LENGTH, num_prompt=3, num_outputs=1, num_cached=0, error=None),
        ),
        gauges=Gauges(num_running=1, steps=3),
    ),
]


def test_every_message_to_the_engine_survives_encoding_and_decoding() -> None:
    stream = b"".join(encode_frame(message) for message in TO_ENGINE)
    assert FrameReader(ToEngine).feed(stream) == TO_ENGINE


def test_every_message_from_the_engine_survives_encoding_and_decoding() -> None:
    stream = b"".join(encode_frame(message) for message in FROM_ENGINE)
    assert FrameReader(FromEngine).feed(stream) == FROM_ENGINE


@given(st.data())
def test_frames_cut_anywhere_arrive_whole_and_in_order(data: st.DataObject) -> None:
    stream = b"".join(encode_frame(message) for message in FROM_ENGINE)
    cuts = sorted(data.draw(st.lists(st.integers(min_value=0, max_value=len(stream)))))
    reader = FrameReader(FromEngine)
    arrived: list[FromEngine] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        arrived += reader.feed(stream[start:end])
    assert arrived == FROM_ENGINE


def test_a_length_over_the_limit_is_refused_before_its_body_is_awaited() -> None:
    with pytest.raises(WireError, match=r"wire\.too_large"):
        FrameReader(ToEngine).feed(struct.pack("<I", MAX_FRAME_BYTES + 1))


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(WireError, match=r"wire\.too_large"):
        encode_frame(Report(tokens=bytes(MAX_FRAME_BYTES + 1)))


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xc1", id="never used by MessagePack"),
        pytest.param(b"\x80", id="no tag"),
        pytest.param(msgspec.msgpack.encode({"type": "delete_everything"}), id="unknown tag"),
        pytest.param(b"\x82\xa4type\xa4qu\xfft\xa1x\xc0", id="not UTF-8"),
        pytest.param(b"\x82\xa4type\xa4quit\xa1x" + b"\x91" * 100_000 + b"\xc0", id="nested without end"),
    ],
)
def test_a_frame_that_is_not_a_message_is_refused(body: bytes) -> None:
    with pytest.raises(WireError, match=r"wire\.unreadable"):
        FrameReader(ToEngine).feed(struct.pack("<I", len(body)) + body)


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(WireError, match=r"wire\.unreadable"):
        FrameReader(ToEngine).feed(encode_frame(Loading("weights")))


@given(st.binary(max_size=256))
def test_hostile_bytes_give_messages_or_a_wire_error(hostile: bytes) -> None:
    reader = FrameReader(ToEngine)
    try:
        messages = reader.feed(hostile) + reader.feed(encode_frame(Quit()))
    except WireError:
        return
    assert all(isinstance(message, Start | Submit | Abort | Quit) for message in messages)


@given(st.binary(max_size=64), st.integers(min_value=0, max_value=60))
def test_a_damaged_body_gives_a_message_or_a_wire_error(noise: bytes, at: int) -> None:
    body = bytearray(encode_frame(Submit(REQUEST))[4:])
    body[at : at + len(noise)] = noise
    try:
        messages = FrameReader(ToEngine).feed(struct.pack("<I", len(body)) + body)
    except WireError:
        return
    assert len(messages) == 1

"""The predicted speed of decoding, for rates of a machine that are given."""

import pytest

from tiercel.cli.decode_prediction import DecodeWork, predict_decode

HALF_BILLION = DecodeWork(weights_bytes=1_000_000_000, flops_per_token=1e9, kv_token_bytes=12_288)
READ, MULTIPLY = 40e9, 200e9  # of a small machine, per second


def test_one_stream_reads_all_weights_for_every_token() -> None:
    alone = predict_decode(HALF_BILLION, 1, 0, READ, MULTIPLY)

    assert alone.tokens_per_s == pytest.approx(40)
    assert alone.bound_by == "reading memory"


def test_more_streams_share_the_weights_until_multiplying_takes_longer() -> None:
    few, many = (predict_decode(HALF_BILLION, streams, 0, READ, MULTIPLY) for streams in (4, 16))

    assert few.tokens_per_s == pytest.approx(4 * 40)
    assert (many.tokens_per_s, many.bound_by) == (pytest.approx(200), "multiplying")


def test_every_stream_reads_its_own_context() -> None:
    """4,096 tokens of 12,288 bytes, for each of two streams beside the weights."""
    two = predict_decode(HALF_BILLION, 2, 4096, READ, MULTIPLY)

    assert two.tokens_per_s == pytest.approx(2 / ((1e9 + 2 * 4096 * 12_288) / READ))


def test_half_the_bandwidth_halves_a_speed_that_is_bound_by_it() -> None:
    fast, slow = (predict_decode(HALF_BILLION, 1, 512, rate, MULTIPLY) for rate in (READ, READ / 2))

    assert slow.tokens_per_s == pytest.approx(fast.tokens_per_s / 2)


def test_a_mixture_reads_the_experts_that_are_hit() -> None:
    """Of 16 experts one token skips 14; two independent tokens skip a share of (14 / 16) ** 2."""
    mixture = DecodeWork(1_000_000_000, 1e8, 0, expert_bytes=800_000_000, skipped_share=14 / 16)

    assert mixture.read_bytes(1) == pytest.approx(200e6 + 800e6 * 2 / 16)
    assert mixture.read_bytes(2) == pytest.approx(200e6 + 800e6 * (1 - (14 / 16) ** 2))
    assert mixture.read_bytes(1000) == pytest.approx(1e9)
    alone, two = (predict_decode(mixture, streams, 0, READ, 1e15).tokens_per_s for streams in (1, 2))
    assert 1 < two / alone < 2

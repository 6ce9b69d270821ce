"""Parsing of numbers with units."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.values.units import GIB, KIB, MIB, parse_bytes, parse_length, show_bytes


@pytest.mark.parametrize(
    ("text", "tokens"), [("4096", 4096), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("1M", 1024 * 1024), (" 7 ", 7)]
)
def test_lengths_read_as_vllm_users_write_them(text: str, tokens: int) -> None:
    assert parse_length(text) == tokens


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("512", 512), ("4k", 4 * KIB), ("512M", 512 * MIB), ("2GiB", 2 * GIB), ("1.5gb", GIB + GIB // 2)],
)
def test_sizes_count_in_powers_of_1024(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "k", "-1", "1e3", "8x", "1 2", "0x10", "nan", "8kk", "\u0661x"])
def test_a_value_that_is_not_a_number_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="write 4096, 8k or 8K"):
        parse_length(text)
    with pytest.raises(ValueError, match="write 1073741824, 512M or 2GiB"):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=1 << 60))
def test_plain_numbers_stand_for_themselves(count: int) -> None:
    assert parse_bytes(str(count)) == float(count)
    assert parse_length(str(count)) == float(count)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 * MIB, "3.0 MiB"),
        (GIB, "1.0 GiB"),
        (5 * KIB * GIB, "5.0 TiB"),
    ],
)
def test_sizes_are_shown_in_the_unit_people_use(count: int, text: str) -> None:
    assert show_bytes(count) == text

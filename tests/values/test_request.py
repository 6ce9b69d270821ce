"""Packed token lists of requests."""

from hypothesis import given
from hypothesis import strategies as st

from tiercel.values.request import pack_tokens, unpack_tokens


@given(st.lists(st.integers(min_value=0, max_value=2**32 - 1)))
def test_packed_tokens_come_back_and_take_four_bytes_each(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert len(packed) == 4 * len(tokens)
    assert list(unpack_tokens(packed)) == tokens

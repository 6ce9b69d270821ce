"""Server-sent events."""

import random

import pytest
from msgspec import Struct

from tests.seeds import fresh_seeds
from tiercel.server.http.sse import PLACEHOLDER, EventFrame, event

_LETTERS = (
    "a",
    " ",
    '"',
    "\\",
    "\n",
    "\r",
    "\t",
    "\x00",
    "\x7f",
    "\x85",
    "\u2028",
    "\u2029",
    "é",
    "你",
    "🙂",
    "</",
    "data: ",
)


class _Value(Struct):
    name: str
    text: str
    after: int | None = None


@pytest.mark.parametrize("seed", [1, 2, *fresh_seeds(2)])
def test_a_frame_gives_the_same_bytes_as_encoding_the_whole_event(seed: int) -> None:
    rng = random.Random(seed)
    name = "".join(rng.choices(_LETTERS, k=5)).replace(PLACEHOLDER, "")
    frame = EventFrame.of(event(_Value(name, PLACEHOLDER)))
    assert frame is not None
    for _ in range(200):
        text = "".join(rng.choices(_LETTERS, k=rng.randrange(12)))
        assert frame.event(text) == event(_Value(name, text))


def test_a_frame_needs_its_placeholder_exactly_once() -> None:
    assert EventFrame.of(event(_Value("a", "b"))) is None
    assert EventFrame.of(event(_Value(PLACEHOLDER, PLACEHOLDER))) is None

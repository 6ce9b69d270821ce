"""Events in pieces of any size, and the text and errors in them."""

import pytest

from tiercel.loadtest.client.sse import EventReader, decode_event, error_message

EVENTS = b': hi\n\ndata: {"a":1}\n\ndata: two\r\ndata: lines\r\n\r\nevent: x\ndata:[DONE]\n\n'


@pytest.mark.parametrize("size", [1, 2, 5, len(EVENTS)])
def test_events_are_whole_in_pieces_of_any_size(size: int) -> None:
    reader = EventReader()
    found = [event for at in range(0, len(EVENTS), size) for event in reader.feed(EVENTS[at : at + size])]
    assert found == [b'{"a":1}', b"two\nlines", b"[DONE]"]


def test_text_is_found_in_every_known_field() -> None:
    texts = [
        b'{"choices":[{"text":"a"}]}',
        b'{"choices":[{"delta":{"content":"a"}}]}',
        b'{"choices":[{"delta":{"content":null,"reasoning_content":"a"}}]}',
        b'{"choices":[{"message":{"content":"a","role":"assistant"},"logprobs":null}]}',
    ]
    for text in texts:
        choices = decode_event(text).choices
        assert choices is not None
        assert choices[0].new_text == "a"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error":{"message":"too busy","code":503}}', "too busy"),
        (b'{"error":"too busy"}', "too busy"),
        (b'{"object":"error","message":"too busy"}', "too busy"),
        (b'{"detail":"too busy"}', "too busy"),
        (b"<html>\n too  busy", "<html> too busy"),
        (b"\xff", "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_the_message_of_an_error_is_found_in_every_known_format(body: bytes, words: str) -> None:
    assert error_message(body) == words

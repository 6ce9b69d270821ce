"""Bodies and events cut anywhere on their way."""

import pytest

from tiercel.loadtest.client.http1_body import ChunkedBody, ProtocolFault, body_reader
from tiercel.loadtest.client.sse import EventReader, decode_event, error_message

CHUNKED = b"5\r\nhello\r\n1;name=x\r\n \r\n5\r\nworld\r\n0\r\nTrailer: x\r\n\r\n"
EVENTS = b': hi\n\ndata: {"a":1}\n\ndata: two\r\ndata: lines\r\n\r\nevent: x\ndata:[DONE]\n\n'


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(CHUNKED)])
def test_a_chunked_body_is_whole_however_it_is_cut(size: int) -> None:
    body = ChunkedBody()
    found = b"".join(body.feed(CHUNKED[at : at + size]) for at in range(0, len(CHUNKED), size))
    assert found == b"hello world"
    assert body.is_complete


@pytest.mark.parametrize("broken", [b"xyz\r\n", b"1\r\nab\r\n", b"f" * 20_000])
def test_a_broken_chunk_is_a_fault(broken: bytes) -> None:
    body = ChunkedBody()
    with pytest.raises(ProtocolFault):
        body.feed(broken)
        body.feed(b"")


def test_a_body_ends_by_its_length_or_with_the_connection() -> None:
    by_length, is_kept = body_reader(200, [(b"Content-Length", b"3")])
    assert (by_length.feed(b"abcdef"), by_length.is_complete, is_kept) == (b"abc", True, True)
    by_close, is_kept = body_reader(200, [(b"Connection", b"close")])
    assert (by_close.feed(b"abc"), by_close.is_complete, by_close.ends_with_connection, is_kept) == (
        b"abc",
        False,
        True,
        False,
    )
    with pytest.raises(ProtocolFault):
        body_reader(200, [(b"Content-Length", b"-1")])


@pytest.mark.parametrize("size", [1, 2, 5, len(EVENTS)])
def test_events_are_whole_however_they_are_cut(size: int) -> None:
    reader = EventReader()
    found = [event for at in range(0, len(EVENTS), size) for event in reader.feed(EVENTS[at : at + size])]
    assert found == [b'{"a":1}', b"two\nlines", b"[DONE]"]


def test_text_is_found_wherever_an_api_puts_it() -> None:
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
def test_the_words_of_an_error_are_found_in_any_wrapping(body: bytes, words: str) -> None:
    assert error_message(body) == words

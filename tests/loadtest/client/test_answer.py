"""Answers that arrive piece by piece at known times."""

from tiercel.loadtest.client.answer import Answer


def _event(text: str) -> bytes:
    return b'data: {"choices":[{"text":"' + text.encode() + b'"}]}\n\n'


def test_only_chunks_with_content_are_stamped() -> None:
    answer = Answer(is_stream=True)
    answer.take(1.0, b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n')
    answer.take(2.0, _event("a"))
    answer.take(3.0, _event("b") + _event("c"))
    answer.take(4.0, b'data: {"choices":[{"text":"","finish_reason":"stop"}]}\n\n')
    answer.take(5.0, b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3}}\n\n')
    answer.take(6.0, b"data: [DONE]\n\n")
    answer.finish()
    assert answer.error is None
    assert answer.chunks_s == [2.0, 3.0, 3.0]
    assert answer.last_s == 4.0
    assert answer.text == "abc"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_an_error_event_fails_the_answer_with_its_words() -> None:
    answer = Answer(is_stream=True)
    answer.take(1.0, _event("a") + b'data: {"error":{"message":"the engine died"}}\n\ndata: [DONE]\n\n')
    answer.finish()
    assert answer.error == "error event: the engine died"


def test_a_null_error_is_none() -> None:
    answer = Answer(is_stream=True)
    answer.take(1.0, b'data: {"error":null,"choices":[{"text":"a","finish_reason":"stop"}]}\n\n')
    answer.finish()
    assert answer.error is None


def test_a_stream_that_ends_early_has_failed() -> None:
    answer = Answer(is_stream=True)
    answer.take(1.0, _event("a"))
    answer.finish()
    assert answer.error == "the stream ended early: no finish_reason and no [DONE]"


def test_an_event_that_is_not_json_fails_the_answer() -> None:
    answer = Answer(is_stream=True)
    answer.take(1.0, b"data: nonsense\n\n")
    answer.finish()
    assert answer.error == "the stream has an event that is not of the OpenAI API"


def test_a_whole_answer_has_one_chunk_at_its_end() -> None:
    answer = Answer(is_stream=False)
    answer.take(1.0, b'{"choices":[{"text":"abc"}],')
    answer.take(2.0, b'"usage":{"prompt_tokens":5,"completion_tokens":3}}')
    answer.finish()
    assert (answer.error, answer.chunks_s, answer.text) == (None, [2.0], "abc")


def test_a_refusal_prints_the_status_and_message() -> None:
    answer = Answer(is_stream=True)
    answer.take_refusal(1.0, b'{"error":{"message":')
    answer.take_refusal(1.1, b'"too busy"}}')
    answer.refuse(503)
    assert answer.error == "HTTP 503: too busy"

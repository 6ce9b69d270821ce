"""Refusals of the chat API in the words of other APIs: what a client said is never renamed."""

import pytest

from tiercel.server.api.message_turns import in_words_of_messages
from tiercel.server.api.response_call import in_our_words
from tiercel.values.errors import AdmissionError

SCHEMA = "the property 'stop' of messages; response_format: reasoning_effort, chat_template_kwargs"
"""Words of a client."""


@pytest.mark.parametrize(
    ("words", "field", "message", "expected"),
    [
        (in_words_of_messages, "stop", f"stop: {SCHEMA}", f"stop_sequences: {SCHEMA}"),
        (in_words_of_messages, "stop", f"stop.0: {SCHEMA}", f"stop_sequences.0: {SCHEMA}"),
        (in_words_of_messages, "stop", f"stopped: {SCHEMA}", f"stopped: {SCHEMA}"),
        (in_words_of_messages, "stop", f"The stop {SCHEMA}", f"The stop_sequences {SCHEMA}"),
        (in_words_of_messages, "response_format", f"{SCHEMA}", f"{SCHEMA}"),
        (in_our_words, "response_format", f"response_format: {SCHEMA}", f"text.format: {SCHEMA}"),
        (in_our_words, "messages", f"messages.3: {SCHEMA}", f"input.3: {SCHEMA}"),
        (in_our_words, "other", f"response_format: {SCHEMA}", f"response_format: {SCHEMA}"),
    ],
)
def test_only_the_name_of_the_field_is_renamed(words, field: str, message: str, expected: str) -> None:
    with pytest.raises(AdmissionError) as refusal, words():
        raise AdmissionError(400, message, code="odd", param=field, retry_after_s=3)
    assert refusal.value.message == expected
    assert (refusal.value.code, refusal.value.retry_after_s) == ("odd", 3)

"""The error classes."""

from tiercel.values.errors import AdmissionError, ConfigError, DeviceError, InvariantError, TiercelError


def test_an_error_reads_as_its_sentence_and_its_facts() -> None:
    assert str(DeviceError("device.short_read", want=8, got=3)) == "device.short_read (want=8 got=3)"
    assert str(ConfigError("config.value", "--port x: expected a number")) == "--port x: expected a number"


def test_the_code_and_the_facts_stay_readable_for_programs() -> None:
    error = InvariantError("slice.empty", "a slice has no tokens", seq=7)
    assert (error.code, error.message, error.facts) == ("slice.empty", "a slice has no tokens", {"seq": 7})
    assert isinstance(error, TiercelError)


def test_a_refused_request_knows_its_status_and_its_openai_words() -> None:
    error = AdmissionError(429, "slow down", code="rate_limit_exceeded", kind="rate_limit_error", retry_after_s=2.0)
    assert str(error) == "slow down"
    assert (error.status, error.code, error.kind, error.param, error.retry_after_s) == (
        429,
        "rate_limit_exceeded",
        "rate_limit_error",
        None,
        2.0,
    )

"""Which settings may change while the server runs."""

import pytest

from tiercel.settings.groups import GROUPS
from tiercel.settings.live import changed_settings, why_restart
from tiercel.settings.settings import SETTINGS

DEFAULTS = {name: option.default for name, option in SETTINGS.items()}


def test_only_settings_that_act_on_a_running_server_are_live() -> None:
    assert {name for name, option in SETTINGS.items() if option.option.is_live} == {
        *("max_num_seqs", "max_num_queued_reqs", "long_prefill_token_threshold", "max_long_partial_prefills"),
        *("scheduling_policy", "tbt_goal", "min_prefill_share", "kv_disk_daily_writes"),
        *("shutdown_timeout", "stall_timeout", "sse_keep_alive_interval", "max_body_bytes"),
        *("request_timeout", "queue_timeout", "timeout_body"),
        *("max_pending_body_bytes", "max_answer_bytes"),
        *("stored_responses", "stored_response_tenant_bytes", "stored_response_bytes", "stored_response_lifetime"),
        *(
            "max_logprobs",
            "return_tokens_as_token_ids",
            "prompt_lookup_num_tokens",
            "stream_interval",
            "enable_force_include_usage",
            "enable_prompt_tokens_details",
        ),
        "log_level",
    }


def test_every_group_gives_the_reason_why_its_settings_need_a_restart() -> None:
    for name, option in SETTINGS.items():
        assert (why_restart(name, DEFAULTS, DEFAULTS) is None) == option.option.is_live, name
    assert all(group.why_fixed for group in GROUPS)


def test_changes_are_found_setting_by_setting() -> None:
    assert changed_settings(DEFAULTS, DEFAULTS) == ()
    assert changed_settings(DEFAULTS | {"port": 1, "model": "a"}, DEFAULTS | {"port": 2}) == ("model", "port")


@pytest.mark.parametrize(("number", "may"), [(1, True), (100, True), (101, False)])
def test_max_num_seqs_never_exceeds_its_value_at_the_start(number: int, may: bool) -> None:
    reason = why_restart("max_num_seqs", DEFAULTS | {"max_num_seqs": 100}, DEFAULTS | {"max_num_seqs": number})
    assert (reason is None) == may
    assert may or "started with 100" in str(reason)


@pytest.mark.parametrize(("number", "may"), [(None, True), (256, True), (257, False)])
def test_a_default_that_the_device_chose_may_be_lowered(number: int | None, may: bool) -> None:
    """Only the engine knows how many it chose, and 256 is the least."""
    reason = why_restart("max_num_seqs", DEFAULTS, DEFAULTS | {"max_num_seqs": number})
    assert (reason is None) == may
    assert may or "the default, which is 256 on some devices" in str(reason)
    assert why_restart("max_num_seqs", DEFAULTS | {"max_num_seqs": 8}, DEFAULTS) is None

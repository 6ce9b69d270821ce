"""Which settings may change while the server runs."""

from typing import get_args

import pytest

from tiercel.live import changed_fields, live_fields, why_restart
from tiercel.options import Options, Panel, flag_of


def test_those_that_act_on_a_running_server_are_live_and_no_others() -> None:
    assert set(live_fields()) == {
        *("max_num_seqs", "max_num_queued_reqs", "long_prefill_token_threshold", "max_long_partial_prefills"),
        *("scheduling_policy", "tbt_goal", "kv_disk_daily_writes"),
        *("shutdown_timeout", "stall_timeout", "sse_keep_alive_interval", "max_body_bytes"),
        *("max_logprobs", "stream_interval", "enable_force_include_usage", "enable_prompt_tokens_details"),
        "log_level",
    }


def test_every_group_says_why_its_settings_want_a_restart() -> None:
    said: set[Panel] = set()
    for name, field in Options.model_fields.items():
        reason = why_restart(name, Options(), Options())
        assert (reason is None) == flag_of(field).is_live, name
        said |= {flag_of(field).panel} if reason else set()
    assert said == set(get_args(Panel))


def test_changes_are_found_field_by_field() -> None:
    assert changed_fields(Options(), Options()) == ()
    assert changed_fields(Options(port=1, model="a"), Options(port=2)) == ("model", "port")


@pytest.mark.parametrize(("number", "may"), [(1, True), (100, True), (101, False)])
def test_no_more_sequences_than_at_the_start(number: int, may: bool) -> None:
    reason = why_restart("max_num_seqs", Options(max_num_seqs=100), Options(max_num_seqs=number))
    assert (reason is None) == may
    assert may or "started with 100" in str(reason)

"""Formats that outlive a process, and those that two processes must agree on, are those that were recorded.

After a change that is meant, raise the version of the format and run `python -m tests.formats.samples`.
"""

import dataclasses
from typing import Any

import msgspec
import pytest
import torch

from tests.formats.samples import DENSE, FORMATS, MIXTURE, Recorded, is_silent_change, read_golden, record
from tiercel.engine.measure.step_grid import GridLimits
from tiercel.engine.models.config import ConfigFields, parse_decoder
from tiercel.engine.models.mixture_config import MixtureConfig
from tiercel.engine.models.precision import Precision
from tiercel.values.facts import Facts, canonical, identity_of_facts
from tiercel.values.tier import KVSpec

GOLDEN = read_golden()


def _shown(raw: bytes) -> object:
    """Return a frame as its fields, and anything else as it is."""
    for start in (8, 4, 0):  # of frames with an epoch, without one, and of packets
        try:
            return msgspec.msgpack.decode(raw[start:])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
    return raw


@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_are_those_that_were_recorded(name: str) -> None:
    found, golden = record(FORMATS[name]), GOLDEN[name]
    assert found.samples.keys() == golden.samples.keys()
    for sample in found.samples:
        assert _shown(found.sample(sample)) == _shown(golden.sample(sample)), sample
    assert found == golden


def test_every_format_is_recorded() -> None:
    assert list(FORMATS) == list(GOLDEN)


def test_a_change_of_bytes_without_a_higher_version_is_refused() -> None:
    old = Recorded(1, {"a": "00", "b": "01"})
    assert is_silent_change(old, Recorded(1, {"a": "00", "b": "02"}))
    assert is_silent_change(old, Recorded(1, {"a": "00"}))
    assert not is_silent_change(old, Recorded(2, {"a": "00", "b": "02"}))
    assert not is_silent_change(old, Recorded(1, {"a": "00", "b": "01", "c": "03"}))
    assert not is_silent_change(Recorded(None, {"a": "00"}), Recorded(None, {"a": "01"}))


# ---- facts: every field has one, and its name is not the field's


def _decoder(config: dict[str, Any]) -> Any:
    return parse_decoder(ConfigFields(config, "config.json"))


STATED: list[Any] = [
    KVSpec(layers=2, kv_heads=2, head_dim=8, block_size=16, dtype="float32"),
    GridLimits(max_num_seqs=4, step_tokens=64, max_model_len=128, kv_tokens=256),
    _decoder(DENSE),
    _decoder(DENSE).rope,
    _decoder(MIXTURE).mixture,
    Precision.of(torch.float32),
]
WITHOUT_EFFECT = {MixtureConfig: {"names"}}  # names of tensors in a checkpoint


@pytest.mark.parametrize("stated", STATED, ids=lambda stated: type(stated).__name__)
def test_every_field_changes_the_facts(stated: Any) -> None:
    is_struct = isinstance(stated, msgspec.Struct)
    names = stated.__struct_fields__ if is_struct else [field.name for field in dataclasses.fields(stated)]
    change = msgspec.structs.replace if is_struct else dataclasses.replace
    for name in names:
        old = getattr(stated, name)
        new: Any = _OtherFacts() if hasattr(old, "facts") or old is None else _other(old)
        changed = change(stated, **{name: new})
        is_seen = canonical(changed.facts) != canonical(stated.facts)
        assert is_seen == (name not in WITHOUT_EFFECT.get(type(stated), set())), name


class _OtherFacts:
    """Stands for any part that states facts of its own."""

    identity = "another"

    @property
    def facts(self) -> Facts:
        return {"another": True}


def _other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "?"
        case tuple():
            return (*value, *value)
        case torch.dtype():
            return torch.bfloat16
        case _:
            return None


def test_facts_are_told_apart_by_name_and_value_and_not_by_their_order() -> None:
    assert identity_of_facts({"a": 1, "b": 2}) == identity_of_facts({"b": 2, "a": 1})
    different: list[Facts] = [{"a": 1}, {"b": 1}, {"a": "1"}, {"a": True}, {"a": None}, {"a": [1]}, {"a": {"b": 1}}]
    assert len({identity_of_facts(facts) for facts in different}) == len(different)


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), object(), b"bytes", torch.float32, GridLimits(1, 2, 3, 4)],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_fact_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        canonical({"a": value})

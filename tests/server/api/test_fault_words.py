"""No client reads the words of the library that checks bodies."""

import math
from collections.abc import Iterator

import pydantic
import pytest
from pydantic_core._pydantic_core import list_all_errors  # pyright: ignore[reportPrivateImportUsage]

import tiercel.server.app  # noqa: F401 - imports every schema
from tiercel.server.api.schemas.fault_words import OWN, fault_words
from tiercel.server.api.schemas.fields import Fields, read_fields
from tiercel.values.errors import AdmissionError

JUNK = (None, True, 5, -(10**30), 1.5, math.nan, "", "\n", "x" * 300_000, [], [[]], [5, "x"], {}, {"a": {}}, b"\xff")


def _schemas(base: type[Fields] = Fields) -> Iterator[type[Fields]]:
    for schema in base.__subclasses__():
        yield schema
        yield from _schemas(schema)


SCHEMAS = {schema.__name__: schema for schema in sorted(set(_schemas()), key=lambda one: one.__name__)}


def test_no_kind_of_fault_has_the_librarys_sentence() -> None:
    kinds = list_all_errors()
    assert len(kinds) > 80
    for kind in kinds:
        context = kind["example_context"] or {}
        said, sentence = fault_words(kind["type"], context, "LIBRARY"), kind["message_template_python"]
        assert said and "LIBRARY" not in said and sentence.split("{")[0].strip() not in (said, said.capitalize())
    assert OWN not in {kind["type"] for kind in kinds}


def test_a_bad_value_of_any_field_is_described_in_our_words() -> None:
    num_faults = 0
    for schema, name, field in ((one, *entry) for one in SCHEMAS.values() for entry in one.model_fields.items()):
        for value in JUNK:
            body = {field.alias or name: value}
            try:
                schema.model_validate(body)
            except pydantic.ValidationError as exc:
                sentences = {fault["msg"] for fault in exc.errors() if fault["type"] != OWN}
                kinds = {fault["type"] for fault in exc.errors()}
                with pytest.raises(AdmissionError) as refusal:
                    read_fields(schema, body)
                num_faults += 1
                said = refusal.value.message
                assert not [one for one in sentences if one in said], body
                assert not [kind for kind in kinds if "_" in kind and kind in said], body
                assert "not valid" not in said, f"{kinds} have no words"
    assert num_faults > 1000

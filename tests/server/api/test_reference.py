"""docs/api.md says of every field of every route what it does."""

from pathlib import Path
from typing import Any

import pytest

from tests.server.api.reference_page import PAGE, document_of, written


@pytest.fixture(scope="module")
def document(model_folder: Path) -> dict[str, Any]:
    return document_of(model_folder)


def test_every_field_of_a_generation_route_says_what_it_does(document: dict[str, Any]) -> None:
    bodies = {name: schema for name, schema in document["components"]["schemas"].items() if name.endswith("Fields")}
    assert {"ChatFields", "CompletionFields", "TokenizeTextFields", "DetokenizeFields"} <= bodies.keys()
    for name in ("ChatFields", "CompletionFields", "TokenizeTextFields", "TokenizeChatFields", "DetokenizeFields"):
        fields = bodies[name]["properties"]
        assert [field for field, schema in fields.items() if not schema.get("description")] == [], name


def test_the_page_has_the_fields_of_the_document(document: dict[str, Any]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page, document) == page, "run: python -m tests.server.api.reference_page"

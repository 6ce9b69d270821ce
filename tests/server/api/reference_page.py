"""Write the generated part of docs/api.md: python -m tests.server.api.reference_page."""

import json
import tempfile
from pathlib import Path
from typing import Any, cast

from tests.server.builders import build_byte_level
from tests.server.harness import TEMPLATE, Running, server_settings, with_server
from tools.api_reference import BEGIN, END, field_reference

PAGE = Path(__file__).parents[3] / "docs" / "api.md"


def document_of(model_folder: Path) -> dict[str, Any]:
    """Return /openapi.json of a server."""

    async def test(server: Running) -> dict[str, Any]:
        return cast(dict[str, Any], (await server.http.get("/openapi.json")).json())

    return with_server(
        server_settings(model_folder),
        test,
        disable_fastapi_docs=False,
        enable_server_load_tracking=True,
        tokenizer_info_endpoint=True,
    )


def written(page: str, document: dict[str, Any]) -> str:
    """Return the page with its generated part made anew."""
    before, _, rest = page.partition(BEGIN)
    return before + field_reference(document) + rest.partition(END)[2]


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        build_byte_level().save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": TEMPLATE}))
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), document_of(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()

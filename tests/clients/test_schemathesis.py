"""schemathesis: bodies, queries and paths made from /openapi.json, valid ones and others, sent to every operation.

No answer may be a server error, have a status or a media type that the document does not name for the operation, or
have a body that breaks its schema.
"""

import hashlib
import re
from pathlib import Path

import pytest

from tests.clients.environments import TOURS, client_python, run_client
from tests.e2e.daemon import Daemon, daemon

KEY, ADMIN_KEY = "sk-test", "sk-admin"
EXAMPLES = 200  # of each operation
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def examine(served: Daemon, key: str, *flags: str, folder: Path) -> int:
    """Run schemathesis; the test fails with its report if a check does. Return the number of operations."""
    program = client_python("schemathesis").with_name("st")
    said = run_client(
        [str(program), "--config-file", str(TOURS / "schemathesis.toml"), "run", f"{served.url}/openapi.json",
         "-H", f"Authorization: Bearer {key}", "--checks", CHECKS, "--phases", "examples,fuzzing",
         "--max-examples", str(EXAMPLES), "--continue-on-failure", "--no-color", "--warnings", "off", *flags],
        patience_s=1500, cwd=folder,
    )  # fmt: skip
    print(said)
    found = re.search(r"Tested: (\d+)", said)
    assert found, said
    return int(found[1])


@pytest.mark.timeout(1600)
def test_the_api_answers_as_its_document_says(tmp_path: Path) -> None:
    client_python("schemathesis")
    files = ("--files-path", str(tmp_path / "files"))
    short = ("--max-model-len", "256", "--no-disable-fastapi-docs")
    with daemon(tmp_path, "--api-key", KEY, *files, *short) as served:
        assert examine(served, KEY, "--exclude-path-regex", "^/admin", folder=tmp_path) >= 35
        served.assert_nothing_held()


@pytest.mark.timeout(1600)
def test_the_routes_of_the_operator_answer_as_their_document_says(tmp_path: Path) -> None:
    """They are alone, because they change the tenants and the limits that the other routes obey."""
    client_python("schemathesis")
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(
        f"admin_key_sha256: {hashlib.sha256(ADMIN_KEY.encode()).hexdigest()}\ntenants: [{{name: one, key: {KEY}}}]\n"
    )
    with daemon(tmp_path, "--tenants-config", str(tenants), "--no-disable-fastapi-docs") as served:
        assert examine(served, ADMIN_KEY, "--include-path-regex", "^/admin", folder=tmp_path) == 5

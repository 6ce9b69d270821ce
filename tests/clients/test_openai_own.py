"""The tests of OpenAI's client for Python, out of its source distribution, against the daemon.

They check that the client accepts every answer in its strict mode, where each value must have its declared type.
"""

import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.clients.environments import FOLDER, client_python, run_client
from tests.clients.stand_in import stand_in
from tests.e2e.daemon import daemon

FILES = (
    "test_models.py", "test_completions.py", "chat/test_completions.py", "chat/completions/test_messages.py",
    "test_embeddings.py", "test_responses.py", "responses/test_input_items.py", "responses/test_input_tokens.py",
    "test_conversations.py", "conversations/test_items.py", "test_files.py", "test_batches.py",
)  # fmt: skip
NAMES = ("gpt-6-astra", "gpt-3.5-turbo-instruct", "text-embedding-3-small", "model", "string")
EXCLUDED = {
    # has `audio`
    "chat/test_completions.py::TestCompletions": ("create_with_all_params",),
    # models are the operator's
    "test_models.py::TestModels": ("method_delete", "response_delete"),
    # has `best_of: 0`
    "test_completions.py::TestCompletions": ("all_params",),
    # the strict client refuses the base64 text that it asks for itself; the loose one decodes it
    "test_embeddings.py::TestEmbeddings": ("_create[strict]", "_create[aiohttp]"),
    "test_responses.py::TestResponses": (
        "create_with_all_params",  # has `conversation` and `previous_response_id`, which exclude each other
        "_compact",  # conversations are not compacted
    ),
    "responses/test_input_tokens.py::TestInputTokens": ("all_params",),  # the same two fields
    # pages of `limit: 0`
    "responses/test_input_items.py::TestInputItems": ("all_params",),
    "test_batches.py::TestBatches": ("list_with_all_params",),
    "test_files.py::TestFiles": ("list_with_all_params",),
    "conversations/test_items.py::TestItems": ("list_with_all_params",),
}
"""The tests that are left out: by file and class, parts of their names. The classes `TestAsync...` have the same."""


def excluded(collected: str) -> list[str]:
    """Return the ids of the collected tests that are left out."""
    found: list[str] = []
    for line in collected.splitlines():
        plain = line.replace("::TestAsync", "::Test")
        for place, parts in EXCLUDED.items():
            if f"/api_resources/{place}::" in plain and any(part in plain.split("::")[2] for part in parts):
                found.append(line)
    return found


def unpack_source(python: Path) -> Path:
    """Return the folder of the source distribution of the version that is installed."""
    version = run_client([str(python), "-c", "import openai; print(openai.__version__)"], patience_s=60).strip()
    folder = FOLDER / "openai_own" / "source" / f"openai-{version}"
    if not folder.exists():
        shutil.rmtree(folder.parent, ignore_errors=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps"]
        command = [*pip, "--no-binary", "openai", "--dest", str(folder.parent), f"openai=={version}"]
        subprocess.run(command, check=True, timeout=300)
        with tarfile.open(folder.with_name(folder.name + ".tar.gz")) as archive:
            archive.extractall(folder.parent, filter="data")
    return folder


@pytest.mark.timeout(900)
def test_the_clients_own_tests(tmp_path: Path) -> None:
    python = client_python("openai_own")
    source = unpack_source(python)
    names = [f"--served-model-name={name}" for name in NAMES]
    with (
        daemon(tmp_path, *names, "--files-path", str(tmp_path / "files")) as served,
        stand_in(served.http, NAMES[0]) as url,
    ):
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--tb=short"]
        files = [f"tests/api_resources/{name}" for name in FILES]
        variables = {"TEST_API_BASE_URL": f"{url}/v1", "PYTHONDONTWRITEBYTECODE": "1"}
        collected = run_client([*command, "--collect-only", *files], patience_s=60, cwd=source, variables=variables)
        left_out = [f"--deselect={name}" for name in excluded(collected)]
        said = run_client([*command, *left_out, *files], patience_s=800, cwd=source, variables=variables)
    print(said)
    assert (found := re.search(r"(\d+) passed", said)), said
    assert int(found[1]) >= 728, said

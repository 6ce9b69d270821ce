"""LangChain's own tests of chat models. They need a model that calls functions: see `following_model`."""

import re
from pathlib import Path

from tests.clients.environments import TOURS, client_python, run_client
from tests.clients.following_server import following_daemon

KEY, NAMES = "sk-test", ("first-name", "second-name")
NUM_SKIPPED = 14  # in two classes, seven for flags that are off: see `langchain_suite`


def test_langchains_standard_tests(tmp_path: Path) -> None:
    python = client_python("langchain")
    flags = ("--api-key", KEY, *(f"--served-model-name={name}" for name in NAMES))
    with following_daemon(tmp_path, *flags) as served:
        said = run_client(
            [str(python), "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--noconftest",
             "-c", "/dev/null", "--rootdir", "/",
             "-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session",
             str(TOURS / "langchain_suite.py")],
            patience_s=280, cwd=tmp_path,
            variables={
                "TOUR_URL": served.url, "TOUR_KEY": KEY, "TOUR_MODEL": NAMES[0], "TOUR_OTHER_NAME": NAMES[1],
                "LANGSMITH_TRACING": "false", "PYTHONDONTWRITEBYTECODE": "1",
            },
        )  # fmt: skip
        served.assert_nothing_held()
    print(said)
    assert (found := re.search(r"(\d+) passed, (\d+) skipped", said)), said
    assert int(found[2]) == NUM_SKIPPED, said

"""`--root-path`: behind a proxy that removes the prefix, and behind one that does not."""

from pathlib import Path

import pytest

from tests.server.harness import Running, server_settings, text_body, with_server
from tiercel.server.http.listen import bind, url_of
from tiercel.server.http.root_path import check_root_path
from tiercel.settings.option import options_of
from tiercel.settings.settings import ServerSettings
from tiercel.values.errors import ConfigError


def test_every_route_is_served_with_the_prefix_and_without(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for path in ("/health", "/v1/models", "/metrics", "/ui", "/ui/app.js", "/ui/data", "/admin/config", "/docs"):
            kept, removed = [await server.http.get(prefix + path) for prefix in ("/llm", "")]
            assert kept.status_code == removed.status_code == (403 if path == "/admin/config" else 200), path
        for prefix in ("/llm", ""):
            answer = await server.http.post(f"{prefix}/v1/completions", json=text_body(max_tokens=1))
            assert answer.status_code == 200
        for path in ("/llmx/health", "/llm/llm/health", "/other/health"):
            assert (await server.http.get(path)).status_code == 404, path
        wrong = await server.http.get("/llm/v1/completions")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")

    with_server(server_settings(model_folder), test, root_path="/llm", disable_fastapi_docs=False)


def test_links_have_the_prefix(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for prefix in ("/llm", ""):
            assert "'/llm/openapi.json'" in (await server.http.get(f"{prefix}/docs")).text
            document = (await server.http.get(f"{prefix}/openapi.json")).json()
            assert document["servers"] == [{"url": "/llm"}]
            assert "/v1/completions" in document["paths"]
            page = await server.http.get(f"{prefix}/ui/", follow_redirects=False)
            assert page.headers["location"] == "../ui"

    with_server(server_settings(model_folder), test, root_path="/llm", disable_fastapi_docs=False)


def test_generations_are_counted_under_their_route(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for prefix in ("/llm", ""):
            await server.http.post(f"{prefix}/v1/completions", json=text_body(max_tokens=1))
        assert 'handler="/v1/completions",method="POST"' in (await server.http.get("/llm/metrics")).text

    with_server(server_settings(model_folder), test, root_path="/llm")


def test_a_slash_at_the_end_of_the_prefix_is_dropped(model_folder: Path) -> None:
    option = options_of(ServerSettings)["root_path"]
    assert [option.read(text) for text in ("/llm/", "/a/b", "/", "")] == ["/llm", "/a/b", "", ""]
    settings = server_settings(model_folder)
    with bind(settings) as listener:
        assert url_of(settings, listener).endswith(str(listener.getsockname()[1]))


@pytest.mark.parametrize("prefix", ["/v1", "/ui", "/v1/models", "/health"])
def test_a_prefix_that_is_the_begin_of_a_route_is_refused(prefix: str) -> None:
    """/v1/models would be either the route or, with the prefix, a route /models that does not exist."""
    paths = ("/v1/models", "/ui/data", "/health")
    with pytest.raises(ConfigError, match=f"--root-path {prefix}: the server has routes of its own"):
        check_root_path(prefix, paths)
    for fine in ("", "/v", "/llm", "/v1/model", "/healthy"):
        check_root_path(fine, paths)

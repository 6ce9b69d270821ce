"""The root, and the answers to paths that are no routes: they name what was asked for and what was probably meant."""

from pathlib import Path

import pytest

from tests.server.harness import Running, server_settings, with_server
from tiercel.server.http.nearest_route import nearest_route

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_browser_at_the_root_is_sent_to_the_page_and_others_get_one_line(prefix: str, model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for path in dict.fromkeys(("/", f"{prefix}/")):
            shown = await server.http.get(path, headers=BROWSER, follow_redirects=False)
            assert (shown.status_code, shown.headers["location"]) == (307, f"{prefix}/ui")
            landed = await server.http.get(path, headers=BROWSER, follow_redirects=True)
            assert (landed.status_code, landed.url.path) == (200, f"{prefix}/ui")
            told = await server.http.get(path)
            assert (told.status_code, told.headers["content-type"]) == (200, "text/plain; charset=utf-8")
            assert told.text == (
                f"tiercel serves tiny: an OpenAI-compatible API at {prefix}/v1, a dashboard at {prefix}/ui.\n"
            )
            assert shown.headers["vary"] == told.headers["vary"] == "Accept"
            assert (await server.http.head(path)).status_code == 200

    with_server(server_settings(model_folder), test, root_path=prefix)


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        ("GET", "/v1/model", "There is no route /v1/model. The nearest is /v1/models."),
        ("POST", "/chat/completions", "There is no route /chat/completions. The nearest is /v1/chat/completions."),
        ("POST", "/v1/v1/completions", "There is no route /v1/v1/completions. The nearest is /v1/completions."),
        ("POST", "/v1/responses/abc/cancle", "The nearest is /v1/responses/{id}/cancel."),
        ("GET", "/uii", "The nearest is /ui."),
        ("GET", "/zzzzzzzzzzzzzzzzzzzz", "There is no route /zzzzzzzzzzzzzzzzzzzz."),
        ("GET", "/a%0Ab%1b%5b31m", "There is no route /a?b?[31m."),
    ],
)
def test_an_unknown_route_is_named_with_the_nearest_one(
    method: str, path: str, message: str, model_folder: Path
) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.request(method, path)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "not_found")
        assert message in error["message"]
        assert ("nearest" in error["message"]) == ("nearest" in message)

    with_server(server_settings(model_folder), test)


def test_a_long_path_is_cut(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.get("/" + "v1/" * 2000)
        assert answer.status_code == 404
        assert len(answer.json()["error"]["message"]) < 250

    with_server(server_settings(model_folder), test)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("PUT", "/v1/responses/abc", "DELETE, GET, HEAD"),
        ("POST", "/ui", "GET, HEAD"),
        ("DELETE", "/", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_named_with_those_that_the_route_takes(
    method: str, path: str, allowed: str, model_folder: Path
) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        words = f"The route {path} does not take {method}. It takes {allowed.replace(', ', ' and ')}."
        assert answer.json()["error"]["message"] == words

    with_server(server_settings(model_folder), test)


def test_the_nearest_route_takes_parts_of_the_path_for_parameters() -> None:
    routes = ["/v1/files/{file_id}/content", "/v1/files", "/v1/batches/{batch_id}"]
    assert nearest_route("/v1/files/f-1/contents", routes) == "/v1/files/{file_id}/content"
    assert nearest_route("/v1/batch/b-1", routes) == "/v1/batches/{batch_id}"
    assert nearest_route("/", routes) is None
    assert nearest_route("", []) is None

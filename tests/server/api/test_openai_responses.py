"""The official OpenAI client against /v1/responses."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from openai.types.responses import Response

from tests.server.api.test_responses import script
from tests.server.fake_engine import Script
from tests.server.harness import MODEL, Running, server_settings, with_server
from tiercel.server.text.tokenizer import TextCodec

KEY = "sk-test"


def _with_client(model_folder: Path, test: Callable[[openai.OpenAI], None], script: Script) -> None:
    async def run(server: Running) -> None:
        def use() -> None:
            with openai.OpenAI(
                base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, _strict_response_validation=True
            ) as client:
                test(client)

        await asyncio.to_thread(use)

    with_server(server_settings(model_folder), run, script, api_keys=(KEY,))


def test_create_retrieve_list_and_delete(model_folder: Path, codec: TextCodec) -> None:
    def test(client: openai.OpenAI) -> None:
        first = client.responses.create(model=MODEL, input="hello", instructions="Be short.", metadata={"a": "b"})
        assert (first.output_text, first.status) == ("Hello there", "completed")
        second = client.responses.create(model=MODEL, input="more", previous_response_id=first.id)
        assert client.responses.retrieve(second.id) == second
        (item,) = client.responses.input_items.list(second.id)
        assert item.type == "message"
        count = client.responses.input_tokens.count(model=MODEL, input="more", previous_response_id=first.id)
        assert second.usage is not None
        assert count.input_tokens == second.usage.input_tokens
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)

    _with_client(model_folder, test, script(codec))


def test_stream_and_the_clients_stream_helper(model_folder: Path, codec: TextCodec) -> None:
    def test(client: openai.OpenAI) -> None:
        with client.responses.create(model=MODEL, input="hello", stream=True) as plain:
            events = list(plain)
        assert events[0].type == "response.created"
        assert events[-1].type == "response.completed"
        with client.responses.stream(model=MODEL, input="hello") as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            final = stream.get_final_response()
        assert text == final.output_text == "Hello there"

    _with_client(model_folder, test, script(codec, step_s=0.005))


def test_the_async_client_and_the_background(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            response = await client.responses.create(model=MODEL, input="hello", background=True)
            async with asyncio.timeout(5):
                while response.status in ("queued", "in_progress"):
                    await asyncio.sleep(0.01)
                    response = await client.responses.retrieve(response.id)
            assert response.output_text == "Hello there"
            assert (await client.responses.cancel(response.id)).status == "completed"

    with_server(server_settings(model_folder), test, script(codec, step_s=0.005), api_keys=(KEY,))


def test_whole_responses_pass_strict_validation(model_folder: Path, codec: TextCodec) -> None:
    def test(client: openai.OpenAI) -> None:
        raw = client.responses.with_raw_response.create(
            model=MODEL, input="hello", include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=2
        )
        response = Response.model_validate_json(raw.content, strict=True)
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"

    _with_client(model_folder, test, script(codec))


def test_errors_arrive_as_the_exceptions_of_the_client(model_folder: Path) -> None:
    def test(client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as missing:
            client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
        assert missing.value.code == "previous_response_not_found"
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            client.responses.create(model=MODEL, input="word " * 2000)
        with pytest.raises(openai.APIError, match="The engine stopped"):
            list(client.responses.create(model=MODEL, input="x", stream=True))

    _with_client(model_folder, test, Script(step_s=0.02, die_at_step=3))

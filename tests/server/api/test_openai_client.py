"""The official OpenAI client against the server."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from tests.server.fake_engine import Script
from tests.server.harness import MODEL, Running, server_settings, with_server
from tiercel.server.text.tokenizer import TextCodec

KEY = "sk-test"
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


def _script(codec: TextCodec, step_s: float = 0.0) -> Script:
    end = codec.encode("</s>", add_special_tokens=False)[0]
    reply = tuple(codec.encode("Hello there, world!", add_special_tokens=False))
    return Script(reply=(*reply, end), end_token=end, step_s=step_s)


def _with_sync_client(
    model_folder: Path, codec: TextCodec, test: Callable[[openai.OpenAI], None], script: Script | None = None
) -> None:
    async def run(server: Running) -> None:
        def use() -> None:
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
                test(client)

        await asyncio.to_thread(use)

    with_server(server_settings(model_folder), run, script or _script(codec), api_keys=(KEY,))


def test_chat_whole(model_folder: Path, codec: TextCodec) -> None:
    def test(client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=1, temperature=0.5)
        assert answer.choices[0].message.content == "Hello there, world!"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

    _with_sync_client(model_folder, codec, test)


def test_chat_streamed(model_folder: Path, codec: TextCodec) -> None:
    def test(client: openai.OpenAI) -> None:
        with client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, logprobs=True
        ) as stream:
            chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello there, world!"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].usage is not None
        assert chunks[-2].choices[0].finish_reason == "stop"

    _with_sync_client(model_folder, codec, test, _script(codec, 0.01))


def test_chat_with_the_clients_stream_helper(model_folder: Path, codec: TextCodec) -> None:
    def test(client: openai.OpenAI) -> None:
        with client.chat.completions.stream(model=MODEL, messages=MESSAGES, n=1) as stream:
            completion = stream.until_done().get_final_completion()
        assert completion.choices[0].message.content == "Hello there, world!"

    _with_sync_client(model_folder, codec, test, _script(codec, 0.005))


def test_text_completions_whole_and_streamed(model_folder: Path, codec: TextCodec) -> None:
    def test(client: openai.OpenAI) -> None:
        answer = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=50, n=2, logprobs=2)
        assert [choice.text for choice in answer.choices] == ["Hello there, world!"] * 4
        chunks = list(client.completions.create(model=MODEL, prompt="a", max_tokens=50, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello there, world!"

    _with_sync_client(model_folder, codec, test)


def test_chat_with_the_async_client(model_folder: Path, codec: TextCodec) -> None:
    async def test(server: Running) -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
            assert whole.choices[0].message.content == "Hello there, world!"
            text = ""
            async with await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True) as stream:
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
            assert text == "Hello there, world!"
            models = [model.id async for model in client.models.list()]
            assert models == [MODEL, "alias"]
            assert (await client.models.retrieve("alias")).id == "alias"

    with_server(server_settings(model_folder), test, _script(codec), api_keys=(KEY,))


def test_a_parsed_whole_answer_passes_strict_validation(model_folder: Path, codec: TextCodec) -> None:
    def test(client: openai.OpenAI) -> None:
        raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, logprobs=True)
        openai.types.chat.ChatCompletion.model_validate_json(raw.content, strict=True)
        text = client.completions.with_raw_response.create(model=MODEL, prompt="x", logprobs=1)
        openai.types.Completion.model_validate_json(text.content, strict=True)

    _with_sync_client(model_folder, codec, test)


def test_errors_arrive_as_the_exceptions_of_the_client(model_folder: Path, codec: TextCodec) -> None:
    def test(client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="other", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="maximum context length") as long:
            client.completions.create(model=MODEL, prompt="word " * 2000)
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()

    _with_sync_client(model_folder, codec, test)


def test_a_dead_engine_in_mid_stream_raises_in_the_client(model_folder: Path, codec: TextCodec) -> None:
    def test(client: openai.OpenAI) -> None:
        stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="The engine stopped"):
            list(stream)
        stream.close()

    _with_sync_client(model_folder, codec, test, Script(step_s=0.02, die_at_step=3))


def test_embeddings(model_folder: Path, codec: TextCodec) -> None:
    def test(client: openai.OpenAI) -> None:
        answer = client.embeddings.create(model=MODEL, input=["hello", "one two"])  # asks for base64
        plain = client.embeddings.create(model=MODEL, input=["hello", "one two"], encoding_format="float")
        assert [entry.embedding for entry in answer.data] == [entry.embedding for entry in plain.data]
        assert [len(entry.embedding) for entry in answer.data] == [2, 2]
        assert answer.usage.total_tokens > 0
        with pytest.raises(openai.BadRequestError, match="input"):
            client.embeddings.create(model=MODEL, input=[])

    _with_sync_client(model_folder, codec, test)

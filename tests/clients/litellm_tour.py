"""A tour of the API with LiteLLM: python litellm_tour.py URL KEY MODEL PROVIDER."""

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no table from the network

import litellm

URL, KEY, MODEL = sys.argv[1:4]
SERVER = {"api_base": f"{URL}/v1", "api_key": KEY, "max_retries": 0}
HELLO = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": CITY}}


def chat(model: str) -> None:
    answer = litellm.completion(model, HELLO, max_tokens=12, temperature=0, **SERVER)
    text = answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(litellm.completion(model, HELLO, max_tokens=12, temperature=0, stream=True, **SERVER))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == text


def tools(model: str) -> None:
    answer = litellm.completion(
        model, HELLO, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=100, **SERVER
    )
    assert answer.choices[0].message.tool_calls, answer
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    history = [*HELLO, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "22 degrees"}]
    assert litellm.completion(model, history, tools=[TOOL], max_tokens=8, **SERVER).choices[0].message.role
    chunks = list(
        litellm.completion(
            model, HELLO, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "get_weather"}},
            max_tokens=100, stream=True, **SERVER,
        )
    )  # fmt: skip
    built = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert json.loads(built[0].function.arguments)["city"] in ("Paris", "Rome")


def objects(model: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": CITY, "strict": True}}
    answer = litellm.completion(model, HELLO, response_format=form, max_tokens=100, **SERVER)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Rome")


def others(model: str) -> None:
    text = litellm.text_completion(prompt="One, two,", model=f"text-completion-openai/{MODEL}", max_tokens=6, **SERVER)
    assert text.choices[0].text
    vectors = litellm.embedding(model, ["one", "two"], encoding_format="float", **SERVER)
    assert len(vectors.data) == 2
    answer = litellm.responses(input="Hello", model=model, max_output_tokens=8, **SERVER)
    assert answer.status in ("completed", "incomplete")


def errors(model: str) -> None:
    try:
        litellm.completion(model, HELLO, max_tokens=100_000, **SERVER)
        raise AssertionError("more tokens than fit were promised")
    except litellm.BadRequestError as exc:
        assert "maximum context length" in str(exc)
    try:
        litellm.completion(model, HELLO, **{**SERVER, "api_key": "wrong"})
        raise AssertionError("a wrong key was accepted")
    except litellm.AuthenticationError:
        pass


async def concurrently(model: str) -> None:
    answers = [litellm.acompletion(model, HELLO, max_tokens=8, temperature=0, **SERVER) for _ in range(4)]
    assert len({answer.choices[0].message.content for answer in await asyncio.gather(*answers)}) == 1


def main() -> None:
    provider = sys.argv[4]
    model = f"{provider}/{MODEL}"
    for part in (chat, tools, objects):
        part(model)
        print(provider, part.__name__, "ok", flush=True)
    if provider == "openai":
        others(model)
        errors(model)
    asyncio.run(concurrently(model))
    print("others ok")


main()

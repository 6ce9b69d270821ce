"""A tour of the API with OpenAI's client for Python: python openai_tour.py URL KEY MODEL."""

import asyncio
import enum
import io
import json
import math
import sys
import time

import openai
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

URL, KEY, MODEL = sys.argv[1:4]
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


class City(enum.StrEnum):
    PARIS = "Paris"
    ROME = "Rome"


class Weather(BaseModel):
    """The weather in a city."""

    city: City
    is_certain: bool


class GetWeather(BaseModel):
    """Return the weather in a city."""

    city: City


def models(client: openai.OpenAI) -> None:
    listed = client.models.list()
    assert [model.id for model in listed] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"
    try:
        client.models.retrieve("other")
        raise AssertionError("an unknown model was found")
    except openai.NotFoundError as exc:
        assert exc.code == "model_not_found"


def chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=16, temperature=0, logprobs=True)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert answer.id.startswith("chatcmpl-")
    assert answer._request_id
    assert answer.usage is not None and choice.logprobs is not None and choice.logprobs.content is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    is_ended = choice.finish_reason == "stop"  # by a token that has no text
    assert len(choice.logprobs.content) == answer.usage.completion_tokens - is_ended
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=16, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == choice.message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    several = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_completion_tokens=4, n=3, seed=7, temperature=1, stop=["never said"]
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    with client.chat.completions.stream(model=MODEL, messages=HELLO, max_tokens=16, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == choice.message.content


def parse(client: openai.OpenAI) -> None:
    """Structured output: the schema is strict, so that the embedded model follows it."""
    parsed = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Weather, max_tokens=200)
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    bounded = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    for strict in (True, False):
        answer = client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=100,
            response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": bounded, "strict": strict}},
        )  # fmt: skip
        found = json.loads(answer.choices[0].message.content or "")
        assert found["city"] in ("Paris", "Rome") and 1 <= found["days"] <= 9
    guided = client.chat.completions.create(
        model=MODEL, messages=HELLO, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert guided.choices[0].message.content in ("yes", "no")


def tools(client: openai.OpenAI) -> None:
    """A call that is required, streamed and whole, and its result. The embedded model does not call of itself."""
    weather = openai.pydantic_function_tool(GetWeather)
    for choice in ("required", {"type": "function", "function": {"name": "GetWeather"}}):
        answer = client.chat.completions.parse(
            model=MODEL, messages=HELLO, tools=[weather], tool_choice=choice, temperature=0, parallel_tool_calls=False,
            max_tokens=100,
        )  # fmt: skip
        message = answer.choices[0].message
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert isinstance(call.function.parsed_arguments, GetWeather)
        assert answer.choices[0].finish_reason in ("tool_calls", "stop")
        with client.chat.completions.stream(
            model=MODEL, messages=HELLO, tools=[weather], tool_choice=choice, temperature=0, parallel_tool_calls=False,
            max_tokens=100,
        ) as stream:  # fmt: skip
            kinds = {event.type for event in stream}
            streamed = stream.get_final_completion().choices[0].message.tool_calls
        assert "tool_calls.function.arguments.delta" in kinds
        assert streamed is not None
        assert streamed[0].function.arguments == call.function.arguments
    history = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call.model_dump(exclude={"function": {"parsed_arguments"}})]},
        {"role": "tool", "tool_call_id": call.id, "content": "22 degrees"},
    ]
    told = client.chat.completions.create(model=MODEL, messages=history, tools=[weather], max_tokens=8)
    assert told.choices[0].message.role == "assistant"
    untold = client.chat.completions.create(
        model=MODEL, messages=HELLO, tools=[weather], tool_choice="none", max_tokens=8
    )
    assert untold.choices[0].message.tool_calls is None


def completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["One", "Two"], max_tokens=6, temperature=0, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.text[:3] for choice in answer.choices] == ["One", "Two"]
    scored = client.completions.create(model=MODEL, prompt="One two", max_tokens=0, echo=True, logprobs=2)
    scores = scored.choices[0].logprobs
    assert scores is not None and scores.token_logprobs is not None and scores.tokens is not None
    assert "".join(scores.tokens).endswith("One two")
    assert len(scores.token_logprobs) == len(scores.tokens)
    text = "".join(
        chunk.choices[0].text
        for chunk in client.completions.create(model=MODEL, prompt="One", max_tokens=6, temperature=0, stream=True)
    )
    assert answer.choices[0].text == "One" + text


def embeddings(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model=MODEL, input=["one", "two", "one"])  # the client asks for base64
    first, second, again = (entry.embedding for entry in answer.data)
    assert math.dist(first, again) < 1e-5 < math.dist(first, second)  # steps of other sizes may round otherwise
    assert math.isclose(sum(x * x for x in first), 1, rel_tol=1e-3)
    plain = client.embeddings.create(model=MODEL, input="one", encoding_format="float").data[0].embedding
    assert all(math.isclose(a, b, abs_tol=1e-5) for a, b in zip(first, plain, strict=True))
    assert answer.usage.prompt_tokens > 0


def responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="What is two and two?", max_output_tokens=24, temperature=0)
    assert answer.status in ("completed", "incomplete")
    assert answer.output_text
    with client.responses.stream(
        model=MODEL, input="What is two and two?", max_output_tokens=24, temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response() if kinds[-1] == "response.completed" else None
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert final is None or final.output_text == answer.output_text
    kept = client.responses.retrieve(answer.id)
    assert kept.output_text == answer.output_text
    second = client.responses.create(
        model=MODEL, input="And three?", previous_response_id=answer.id, max_output_tokens=16, temperature=0
    )
    assert second.previous_response_id == answer.id
    assert second.usage is not None and answer.usage is not None
    assert second.usage.input_tokens > answer.usage.input_tokens
    assert [item.type for item in client.responses.input_items.list(answer.id)] == ["message"]
    parsed = client.responses.parse(
        model=MODEL, input="Paris?", text_format=GetWeather, max_output_tokens=100, temperature=0
    )
    assert isinstance(parsed.output_parsed, GetWeather)
    called = client.responses.create(
        model=MODEL, input="The weather in Paris?", tool_choice="required", max_output_tokens=100, temperature=0,
        tools=[{"type": "function", "name": "GetWeather", "strict": True,
                "parameters": {**GetWeather.model_json_schema(), "additionalProperties": False}}],
    )  # fmt: skip
    (call,) = (item for item in called.output if item.type == "function_call")
    assert GetWeather.model_validate_json(call.arguments)
    client.responses.delete(answer.id)
    try:
        client.responses.retrieve(answer.id)
        raise AssertionError("a deleted response was found")
    except openai.NotFoundError:
        pass


def batches(client: openai.OpenAI) -> None:
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": MODEL, "messages": [{"role": "user", "content": f"Number {number}"}], "max_tokens": 4},
        }
        for number in range(3)
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")
    assert client.files.content(file.id).content == data
    assert file.id in [entry.id for entry in client.files.list()]
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"of": "tour"}
    )
    end_s = time.monotonic() + 120
    while batch.status not in ("completed", "failed") and time.monotonic() < end_s:
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.output_file_id is not None
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == ["line-0", "line-1", "line-2"]
    assert batch.id in [entry.id for entry in client.batches.list(limit=1)]
    assert client.files.delete(file.id).deleted


def errors(client: openai.OpenAI) -> None:
    try:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
        raise AssertionError("a negative temperature was accepted")
    except openai.BadRequestError as exc:
        assert exc.param == "temperature" and exc.code == "invalid_value"
    try:
        client.with_options(api_key="wrong").models.list()
        raise AssertionError("a wrong key was accepted")
    except openai.AuthenticationError as exc:
        assert exc.code == "invalid_api_key"


async def concurrently() -> None:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as client:
        answers = [
            client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, temperature=0) for _ in range(4)
        ]
        assert len({answer.choices[0].message.content for answer in await asyncio.gather(*answers)}) == 1
        async for _ in await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=64, stream=True):
            break  # the client leaves


PARTS = (models, chat, parse, tools, completions, embeddings, responses, batches, errors)


def main() -> None:
    with openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as client:
        for part in PARTS:
            part(client)
            print(part.__name__, "ok", flush=True)
    asyncio.run(concurrently())
    print("concurrently ok")


main()

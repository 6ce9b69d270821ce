"""A tour of /v1/messages with Anthropic's client: python anthropic_tour.py URL KEY MODEL."""

import asyncio
import json
import sys
import time

import anthropic

URL, KEY, MODEL = sys.argv[1:4]
GREEDY = {"temperature": 0}  # a field of the API that the client has given up
HELLO: list[anthropic.types.MessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: anthropic.types.ToolParam = {
    "name": "get_weather",
    "description": "Returns the weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "strict": True,
}


def create(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model=MODEL, max_tokens=24, messages=HELLO, extra_body=GREEDY, system="Be short.")
    assert message.type == "message"
    assert message.role == "assistant"
    assert message.id.startswith("msg_")
    assert message._request_id
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.usage.output_tokens > 0
    assert all(block.type == "text" for block in message.content)
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be short.")
    cached = message.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == message.usage.input_tokens + cached
    again = [*HELLO, message.to_param(), {"role": "user", "content": "Why?"}]
    assert client.messages.create(model=MODEL, max_tokens=4, messages=again).stop_reason


def stream(client: anthropic.Anthropic) -> None:
    request = {"model": MODEL, "max_tokens": 24, "messages": HELLO, "extra_body": GREEDY}
    whole = client.messages.create(**request)
    raw = list(client.messages.create(**request, stream=True))
    assert [raw[0].type, raw[-2].type, raw[-1].type] == ["message_start", "message_delta", "message_stop"]
    with client.messages.stream(**request) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == "".join(block.text for block in whole.content if block.type == "text")
    assert [block.type for block in final.content] == [block.type for block in whole.content]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def stop(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model=MODEL, max_tokens=24, messages=HELLO, extra_body=GREEDY)
    (block,) = whole.content
    assert block.type == "text"
    word = block.text.split()[1]
    ended = client.messages.create(
        model=MODEL, max_tokens=24, messages=HELLO, extra_body=GREEDY, stop_sequences=["never said", word]
    )
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", word)
    begun = [*HELLO, {"role": "assistant", "content": block.text[:5]}]
    assert client.messages.create(model=MODEL, max_tokens=2, messages=begun).stop_reason == "max_tokens"


def tools(client: anthropic.Anthropic) -> None:
    """Call a function that the model must call, and give it the result."""
    messages: list[anthropic.types.MessageParam] = [{"role": "user", "content": "How is the weather in Paris?"}]
    required: anthropic.types.ToolChoiceAnyParam = {"type": "any", "disable_parallel_tool_use": True}
    request = {"model": MODEL, "max_tokens": 128, "tools": [WEATHER], "extra_body": GREEDY}
    called = client.messages.create(**request, messages=messages, tool_choice=required)
    assert called.stop_reason == "tool_use", called
    (call,) = (block for block in called.content if block.type == "tool_use")
    assert call.name == "get_weather"
    assert call.input["city"] in ("Paris", "Rome")
    assert call.input["days"] in (1, 2)
    with client.messages.stream(**request, messages=messages, tool_choice=required) as events:
        (again,) = (block for block in events.get_final_message().content if block.type == "tool_use")
    assert (again.name, again.input) == (call.name, call.input)
    messages += [
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}]},
    ]
    ended = client.messages.create(**request, messages=messages, tool_choice={"type": "none"})
    assert ended.stop_reason in ("end_turn", "max_tokens")
    counted = client.messages.count_tokens(model=MODEL, messages=messages, tools=[WEATHER])
    assert counted.input_tokens > client.messages.count_tokens(model=MODEL, messages=messages).input_tokens


def shapes(client: anthropic.Anthropic) -> None:
    """Ask for JSON of a schema."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    form: anthropic.types.OutputConfigParam = {"format": {"type": "json_schema", "schema": schema}}
    shaped = client.messages.create(model=MODEL, max_tokens=64, messages=HELLO, output_config=form, extra_body=GREEDY)
    (block,) = shaped.content
    assert block.type == "text"
    assert json.loads(block.text)["city"] == "Paris"


def batches(client: anthropic.Anthropic) -> None:
    """Run a batch with a request that fails, read its results, cancel another one, and delete both."""
    params: anthropic.types.message_create_params.MessageCreateParamsNonStreaming = {
        "model": MODEL, "max_tokens": 4, "messages": HELLO,
    }  # fmt: skip
    ask = client.messages.batches
    batch = ask.create(
        requests=[
            *({"custom_id": f"good-{number}", "params": params} for number in range(3)),
            {"custom_id": "bad", "params": params | {"model": "other"}},
        ]
    )
    assert batch.processing_status == "in_progress"
    assert batch.request_counts.processing == 4
    while (batch := ask.retrieve(batch.id)).processing_status != "ended":
        time.sleep(0.05)
    assert (batch.request_counts.succeeded, batch.request_counts.errored) == (3, 1)
    results = {one.custom_id: one.result for one in ask.results(batch.id)}
    assert len(results) == 4
    good, bad = results["good-1"], results["bad"]
    assert good.type == "succeeded"
    assert good.message.content
    assert bad.type == "errored"
    assert bad.error.error.type == "not_found_error"
    long = ask.create(
        requests=[{"custom_id": str(number), "params": params | {"max_tokens": 200}} for number in range(50)]
    )
    try:
        ask.delete(long.id)
        raise AssertionError("an unfinished batch was deleted")
    except anthropic.BadRequestError as exc:
        assert exc.type == "invalid_request_error"
    assert ask.cancel(long.id).cancel_initiated_at is not None
    while (long := ask.retrieve(long.id)).processing_status != "ended":
        time.sleep(0.05)
    counts = long.request_counts
    assert counts.canceled > 0
    assert counts.canceled + counts.succeeded == 50
    assert sum(one.result.type == "canceled" for one in ask.results(long.id)) == counts.canceled
    assert [one.id for one in ask.list(limit=1)] == [long.id, batch.id]  # goes on to the next page
    assert [one.id for one in ask.list(before_id=batch.id)] == [long.id]
    for one in (batch, long):
        assert ask.delete(one.id).id == one.id
    assert not list(ask.list())


def errors(client: anthropic.Anthropic) -> None:
    try:
        client.messages.create(model="other", max_tokens=4, messages=HELLO)
        raise AssertionError("an unknown model was served")
    except anthropic.NotFoundError as exc:
        assert (exc.type, exc.error_code) == ("not_found_error", "model_not_found")
        assert exc.request_id
    try:
        client.messages.create(model=MODEL, max_tokens=20_000, messages=HELLO)
        raise AssertionError("more tokens than fit were promised")
    except anthropic.BadRequestError as exc:
        assert exc.type == "invalid_request_error"
        assert "maximum context length" in str(exc.api_message)
    try:
        client.with_options(api_key="wrong").messages.create(model=MODEL, max_tokens=4, messages=HELLO)
        raise AssertionError("a wrong key was accepted")
    except anthropic.AuthenticationError as exc:
        assert exc.type == "authentication_error"
    bearer = anthropic.Anthropic(base_url=URL, auth_token=KEY, api_key=None, max_retries=0)
    assert bearer.messages.create(model=MODEL, max_tokens=4, messages=HELLO).content


async def concurrently() -> None:
    async with anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0) as client:
        answers = [
            client.messages.create(model=MODEL, max_tokens=8, messages=HELLO, extra_body=GREEDY) for _ in range(4)
        ]
        texts = {str(message.content) for message in await asyncio.gather(*answers)}
        assert len(texts) == 1
        async with client.messages.stream(model=MODEL, max_tokens=64, messages=HELLO) as events:
            async for _ in events:
                break  # the client leaves


def main() -> None:
    with anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0) as client:
        for part in (create, stream, stop, shapes, tools, batches, errors):
            part(client)
            print(part.__name__, "ok")
    asyncio.run(concurrently())
    print("concurrently ok")


main()

"""Calls of the embedded model, which a grammar makes valid."""

import json
from typing import Any

import openai
import pytest

from tests.e2e.daemon import Daemon

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Paris", "Rome"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.slow
def test_required_calls_are_valid_and_the_loop_goes_on(served: Daemon, stream: bool, choice: Any) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        messages = list(ASKED)
        for turn in range(2):
            common: dict[str, Any] = {
                "model": served.model, "messages": messages, "tools": TOOLS, "tool_choice": choice,
                "parallel_tool_calls": False, "max_tokens": 200, "temperature": float(turn),
            }  # fmt: skip
            if stream:
                with client.chat.completions.stream(**common) as events:
                    answer = events.until_done().get_final_completion()
            else:
                answer = client.chat.completions.create(**common)
            (one,) = answer.choices
            assert one.finish_reason == "tool_calls"
            assert one.message.tool_calls
            (call,) = one.message.tool_calls
            assert call.type == "function"
            arguments = json.loads(call.function.arguments)
            assert call.function.name == "get_weather"
            assert arguments["city"] in ("Paris", "Rome")
            assert set(arguments) <= {"city", "days"}
            messages += [
                {"role": "assistant", "tool_calls": [call.model_dump(include={"id", "type", "function"})]},
                {"role": "tool", "tool_call_id": call.id, "content": "Sunny."},
            ]
        answer = client.chat.completions.create(model=served.model, messages=messages, tools=TOOLS, max_tokens=40)
        assert answer.choices[0].finish_reason in ("stop", "length")

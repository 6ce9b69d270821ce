"""Loops of tool calls with Pydantic AI over both of OpenAI's APIs: python pydantic_ai_tour.py URL KEY MODEL."""

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.messages import ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, KEY, MODEL = sys.argv[1:4]


class Report(BaseModel):
    """The weather in a city."""

    city: str
    degrees: int


def parts(result: object, kind: type) -> list[object]:
    return [part for message in result.all_messages() for part in message.parts if isinstance(part, kind)]  # type: ignore[attr-defined]


async def loop(model: OpenAIChatModel | OpenAIResponsesModel) -> None:
    """The model calls a function, reads its result and answers."""
    asked: list[str] = []
    agent = Agent(model)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Return the weather in a city."""
        asked.append(city)
        return "22 degrees"

    result = await agent.run("What is the weather in Rome?")
    assert asked == ["Rome"]
    assert [part.content for part in parts(result, ToolReturnPart)] == ["22 degrees"]
    assert "22 degrees" in result.output
    assert result.usage.requests == 2
    async with agent.run_stream("And the weather in Oslo?", message_history=result.all_messages()) as stream:
        assert await stream.get_output()


async def outputs(model: OpenAIChatModel | OpenAIResponsesModel) -> None:
    """Structured results: by a function that must be called, by a schema, and by a prompt."""
    kinds = [ToolOutput(Report), NativeOutput(Report)]
    if isinstance(model, OpenAIChatModel):
        kinds.append(PromptedOutput(Report))
    for kind in kinds:
        agent = Agent(model, output_type=kind)
        result = await agent.run("It has 22 degrees in Rome")
        assert isinstance(result.output, Report), result.output
        print(type(model).__name__, type(kind).__name__, result.output, flush=True)
    agent = Agent(model, output_type=Report)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Return the weather in a city."""
        return "22 degrees"

    result = await agent.run("What is the weather in Rome? Use get_weather.")
    assert isinstance(result.output, Report)
    assert "get_weather" in [part.tool_name for part in parts(result, ToolCallPart)]


async def main() -> None:
    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
    for model in (OpenAIChatModel(MODEL, provider=provider), OpenAIResponsesModel(MODEL, provider=provider)):
        await loop(model)
        await outputs(model)
        print(type(model).__name__, "ok", flush=True)


asyncio.run(main())

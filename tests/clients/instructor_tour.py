"""A tour of structured output with instructor: python instructor_tour.py URL KEY MODEL embedded|following."""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict

URL, KEY, MODEL = sys.argv[1:4]
MODES = (
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.MD_JSON,
)
# The modes with a schema or a required call constrain the output: the embedded model can only comply.
CONSTRAINED = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)


class Weather(BaseModel):
    """The weather in a city."""

    model_config = ConfigDict(extra="forbid")  # the embedded model would add fields until the end
    city: Literal["Paris", "Rome"]
    is_certain: bool


ASKED = [{"role": "user", "content": "It is certain: the weather in Rome is mild."}]


def main() -> None:
    follows = sys.argv[4] == "following"
    with openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as client:
        for mode in MODES if follows else CONSTRAINED:
            request = {"model": MODEL, "messages": ASKED, "response_model": Weather, "max_tokens": 300}
            request |= {"temperature": 0, "max_retries": 0}
            if mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
                request["parallel_tool_calls"] = False  # the embedded model would call again and again
            completions = instructor.from_openai(client, mode=mode).chat.completions
            found, answer = completions.create_with_completion(**request)
            assert isinstance(found, Weather)
            assert answer.usage.completion_tokens
            if follows and mode != instructor.Mode.JSON_SCHEMA:  # its schema is not in the prompt
                assert (found.city, found.is_certain) == ("Rome", True), found
            *_, last = completions.create_partial(**request)
            assert last.model_dump() == found.model_dump(), last
            print(mode, "ok", flush=True)


main()

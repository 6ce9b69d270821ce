"""`custom`: prompts of a file with one JSON object per line: `{"prompt": "...", "output_tokens": 64}`."""

from tiercel.loadtest.load.conversation import Conversation
from tiercel.loadtest.load.datasets.dataset import DatasetQuery, enough, json_lines, single
from tiercel.values.errors import ConfigError


def conversations(query: DatasetQuery) -> list[Conversation]:
    """Return the prompts of the file in order. `output_len` overrides the file. Errors: ConfigError."""
    found: list[Conversation] = []
    for number, line in json_lines(query.path):
        if len(found) == query.count:
            break
        prompt, wanted = line.get("prompt"), line.get("output_tokens", 128)
        if not isinstance(prompt, str) or not isinstance(wanted, int) or wanted < 1:
            raise ConfigError(
                "bench.dataset",
                f"--dataset-path {query.path} line {number}: needs a text `prompt` and a number `output_tokens`",
            )
        found.append(single(prompt, query.texts.count(prompt), query.settings.output_len or wanted))
    return enough(found, query)

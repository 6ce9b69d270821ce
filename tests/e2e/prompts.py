"""Prompts of some hundred tokens each, and the answers of a daemon without any cache."""

from pathlib import Path

from tests.e2e.daemon import Daemon, daemon

PROMPTS = tuple(
    f"List {number}. " + " ".join(f"Item {item} is {(item + 7 * number) * 7919 % 10007}." for item in range(50))
    for number in range(12)
)
MIN_TOKENS = 400
ONE_THREAD = ("--threads", "1")  # two engines with two threads each would slow each other down on two cores


def text(answer_of: Daemon, prompt: str) -> str:
    """Return the answer of a successful request."""
    answer = answer_of.complete(prompt)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def cached_tokens(answer_of: Daemon, prompt: str) -> tuple[str, int]:
    """Return the answer and the number of cached prompt tokens."""
    answer = answer_of.complete(prompt).raise_for_status().json()
    assert answer["usage"]["prompt_tokens"] > MIN_TOKENS
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def uncached_answers(folder: Path) -> dict[str, str]:
    """Return the answers by prompt of a daemon without any cache."""
    with daemon(folder, "--no-enable-prefix-caching", *ONE_THREAD) as plain:
        return {prompt: text(plain, prompt) for prompt in PROMPTS}

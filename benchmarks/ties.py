"""Ties: an answer that differs from the expected one because two tokens were equally likely.

Sums in another order change the last bits of logits. A greedy answer may then take another token where the margin of
the two likeliest is smaller than these bits. Draws with a seed are not excused: their noise is not in the answer.
"""

from typing import Any

from benchmarks.whole_answer import CHAT, Outcome, WholeAnswer, post

TIE = 1e-4  # largest margin of two log-probabilities that are a tie


async def is_tie(url: str, served: WholeAnswer) -> bool:
    """Return whether a greedy answer leaves the answer of the daemon at `url` at a tie. Asks that daemon once more."""
    if served.outcome is not Outcome.ANSWERED or served.body.get("temperature") != 0 or _has_penalty(served):
        return False
    chat = {"logprobs": True, "top_logprobs": 2}
    body = {name: value for name, value in served.body.items() if name not in ("stream", "stream_options")}
    status, reply = await post(url, served.path, body | (chat if served.path == CHAT else {"logprobs": 2}), served.key)
    return status == 200 and is_tie_between(served.text, token_margins(reply["choices"][0]["logprobs"]))


def token_margins(logprobs: dict[str, Any]) -> list[tuple[str, float]]:  # Any: JSON
    """Return the text of each token and the margin of the two likeliest there, for chats and completions."""
    if "content" in logprobs:
        tops = [[top["logprob"] for top in one["top_logprobs"]] for one in logprobs["content"]]
        texts = [one["token"] for one in logprobs["content"]]
    else:
        tops = [list(one.values()) for one in logprobs["top_logprobs"]]
        texts = logprobs["tokens"]
    return [(text, _margin(top)) for text, top in zip(texts, tops, strict=True)]


def is_tie_between(served: str, expected: list[tuple[str, float]]) -> bool:
    """Return whether the first token of `expected` that the served text lacks was a tie."""
    at = 0
    for text, margin in expected:
        if not served.startswith(text, at):
            return margin < TIE
        at += len(text)
    return False


def _margin(logprobs: list[float]) -> float:
    ordered = sorted(logprobs, reverse=True)
    return ordered[0] - ordered[1] if len(ordered) > 1 else float("inf")


def _has_penalty(served: WholeAnswer) -> bool:
    return any(served.body.get(f"{name}_penalty") for name in ("frequency", "presence", "repetition"))

"""Figures from the times at which the pieces of answers arrived. All times are in seconds of one clock."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.checks import percentile


@dataclass(slots=True)
class AnswerTimes:
    """One request and the arrival times of its answer."""

    prompt_tokens: int  # sent
    wanted: int  # tokens of the answer that were requested
    sent_s: float = 0.0
    texts_s: list[float] = field(default_factory=list)  # chunks with text
    events_s: list[float] = field(default_factory=list)  # all chunks; a token that completes no character has no text
    end_s: float = 0.0
    counted_prompt: int | None = None  # by the server
    counted_output: int | None = None
    is_cut: bool = False  # the client has closed the connection on purpose
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        """The tokens of the answer: as the server counts them, otherwise its chunks."""
        return len(self.events_s) if self.counted_output is None else self.counted_output

    @property
    def ttft_s(self) -> float:
        return self.texts_s[0] - self.sent_s


def faults(answers: Iterable[AnswerTimes]) -> list[str]:
    """Return what is wrong with the answers: errors, prompts and answers of another length than requested."""
    found: list[str] = []
    for number, answer in enumerate(answers, start=1):
        if answer.error is not None:
            found.append(f"request {number}: {answer.error}")
        elif not answer.texts_s:
            found.append(f"request {number}: no text arrived")
        elif answer.counted_prompt is not None and answer.counted_prompt != answer.prompt_tokens:
            found.append(
                f"request {number}: {answer.prompt_tokens} prompt tokens sent, {answer.counted_prompt} counted"
            )
        elif not answer.is_cut and answer.output_tokens != answer.wanted:
            found.append(f"request {number}: {answer.wanted} tokens requested, {answer.output_tokens} received")
    return found


def gaps(answer: AnswerTimes) -> list[float]:
    """Return the times between chunks."""
    return [after - before for before, after in zip(answer.events_s, answer.events_s[1:], strict=False)]


def gaps_during(answer: AnswerTimes, start_s: float, end_s: float) -> list[float]:
    """Return the gaps that overlap the interval, each in full, and the silence after the last chunk until `end_s`."""
    pairs = zip(answer.events_s, answer.events_s[1:], strict=False)
    found = [after - before for before, after in pairs if after > start_s and before < end_s]
    if answer.events_s and answer.events_s[-1] < end_s:
        found.append(end_s - answer.events_s[-1])
    return found


def throughput(answers: Sequence[AnswerTimes], *, one_by_one: bool) -> dict[str, float]:
    """Return the figures of requests that ran at once, or one after another: then pauses between them do not count."""
    if one_by_one:
        wall_s = sum(answer.end_s - answer.sent_s for answer in answers)
    else:
        wall_s = max(answer.end_s for answer in answers) - min(answer.sent_s for answer in answers)
    outputs = sum(answer.output_tokens for answer in answers)
    every_gap = [gap for answer in answers for gap in gaps(answer)]
    first = [answer.ttft_s for answer in answers]
    return {
        "out_tok_s": outputs / wall_s,
        "ttft_p50_s": percentile(first, 0.5),
        "ttft_p99_s": percentile(first, 0.99),
        "itl_p50_s": percentile(every_gap, 0.5),
        "itl_p99_s": percentile(every_gap, 0.99),
        "tpot_p50_s": statistics.median(
            (answer.texts_s[-1] - answer.texts_s[0]) / max(1, answer.output_tokens - 1) for answer in answers
        ),
        "wall_s": wall_s,
    }


def beside_streams(streams: Sequence[AnswerTimes], long: AnswerTimes) -> dict[str, float]:
    """Return the figures of a long prompt that arrived beside decoding streams, which were cut off afterwards."""
    start_s, first_s = long.sent_s, long.texts_s[0]
    before = [
        after - earlier
        for stream in streams
        for earlier, after in zip(stream.events_s, stream.events_s[1:], strict=False)
        if after <= start_s
    ]
    during = [gap for stream in streams for gap in gaps_during(stream, start_s, first_s)]
    return {
        "long_ttft_s": long.ttft_s,
        "long_prefill_tok_s": long.prompt_tokens / long.ttft_s,
        "gap_max_s": max(during),
        "gap_p50_s": percentile(during, 0.5),
        "gap_p50_before_s": percentile(before, 0.5),
        "gap_max_before_s": max(before, default=0.0),
        "tokens_during": float(len(during)),
        "wall_s": long.end_s - min(stream.sent_s for stream in streams),
    }

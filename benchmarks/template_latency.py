"""Latency of chat templates, which are rendered in processes of their own.

    python benchmarks/template_latency.py [--rounds 200] [--control]

*cost*: conversations of three lengths are rendered in turns by this process and through the pool of `tiercel serve`. At
the median the pool takes at most 10 ms longer.

*hostile*: one rendering that would never end, and then two at once, which occupy both processes, while others are
rendered in a third thread. None of the others takes longer than the time limit of a rendering plus one second.

Exit code 1 if a check is missed. `--control` starts a process for each rendering, and has hostile ones end three times
as late: at least one check of each part must then fail, and the exit code says whether it did. Takes about 15 s.
"""

import argparse
import datetime
import statistics
import sys
import threading
import time
from collections.abc import Callable

from benchmarks.checks import missed_checks, percentile
from tiercel.server.text.template_frames import ChatMessage, RenderJob
from tiercel.server.text.template_pool import LIMIT_S, TemplatePool
from tiercel.server.text.template_renderer import TemplateRenderer
from tiercel.values.errors import AdmissionError

COST_MS, DELAY_S = 10.0, 1.0
CONTROL_TIMES = 3
CONTROL_ROUNDS = 10
SPECIALS = {"bos_token": "<s>"}
TEMPLATE = (
    "{{ bos_token }}"
    "{% if messages[0].content == 'loop' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LENGTHS = {"1 message of 20 words": (1, 20), "20 messages of 100 words": (20, 100), "200 of 500 words": (200, 500)}


def conversation(messages: int, words: int) -> RenderJob:
    """Return a conversation of so many messages with so many words each."""
    roles = ("user", "assistant")
    content = "measure " * words
    return _job([ChatMessage(role=roles[index % 2], content=content) for index in range(messages)])


def _job(messages: list[ChatMessage]) -> RenderJob:
    return RenderJob(messages=messages, switches={}, add_generation_prompt=True, max_letters=100_000_000)


def timed_s(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def open_pool(limit_s: float) -> TemplatePool:
    """Open the pool as `tiercel serve` does, but for the time limit."""
    return TemplatePool.open(TEMPLATE, SPECIALS, limit_s=limit_s)


def render_once(job: RenderJob) -> str:
    """Render in a process that serves nothing else."""
    pool = open_pool(LIMIT_S)
    try:
        return pool.render(job)
    finally:
        pool.close()


def measure_cost(rounds: int, *, is_control: bool) -> list[tuple[str, bool]]:
    """Print the times of both ways; return the checks."""
    here = TemplateRenderer(TEMPLATE, SPECIALS, today=datetime.datetime.now)
    pool = open_pool(LIMIT_S)
    render = render_once if is_control else pool.render
    checks: list[tuple[str, bool]] = []
    print(f"{'':28}{'here':>12}{'pool':>12}{'pool P99':>12}   ms, {rounds} rounds")
    for name, (messages, words) in LENGTHS.items():
        job = conversation(messages, words)
        assert here.render(job) == render(job)
        pairs = [(timed_s(lambda: here.render(job)), timed_s(lambda: render(job))) for _ in range(rounds)]  # noqa: B023 - called at once
        alone, pooled = ([1000 * pair[way] for pair in pairs] for way in (0, 1))
        alone_ms, pooled_ms = statistics.median(alone), statistics.median(pooled)
        more_ms = pooled_ms - alone_ms
        print(f"{name:28}{alone_ms:12.3f}{pooled_ms:12.3f}{percentile(pooled, 0.99):12.3f}")
        checks.append((f"{name}: {more_ms:.2f} ms more at the median, limit {COST_MS:g}", more_ms <= COST_MS))
    pool.close()
    return checks


def measure_hostile(count: int, limit_s: float) -> tuple[str, bool]:
    """Render while `count` renderings do not end. Return the check of the longest of the others."""
    pool = open_pool(limit_s)
    plain, hostile = conversation(20, 100), _job([ChatMessage(role="user", content="loop")])
    codes: list[str | None] = []

    def attack() -> None:
        try:
            pool.render(hostile)
        except AdmissionError as exc:
            codes.append(exc.code)

    threads = [threading.Thread(target=attack) for _ in range(count)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)  # until the hostile ones have their processes
    times_s: list[float] = []
    while any(thread.is_alive() for thread in threads):
        times_s.append(timed_s(lambda: pool.render(plain)))
    times_s += [timed_s(lambda: pool.render(plain)) for _ in range(20)]  # with the processes that replace the others
    pool.close()
    assert codes == ["chat_template_timeout"] * count, codes
    longest_s, most_s = max(times_s), LIMIT_S + DELAY_S
    text = f"{count} hostile at once: the longest of {len(times_s)} others {longest_s:.2f} s, limit {most_s:g}"
    return text, longest_s <= most_s


def main() -> int:
    """Measure, print and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--control", action="store_true", help="without the mechanisms: both parts must fail")
    wanted = parser.parse_args()
    costs = measure_cost(CONTROL_ROUNDS if wanted.control else wanted.rounds, is_control=wanted.control)
    limit_s = LIMIT_S * CONTROL_TIMES if wanted.control else LIMIT_S
    hostile = [measure_hostile(count, limit_s) for count in (1, 2)]
    missed = [missed_checks(part) for part in (costs, hostile)]
    return int(not all(missed)) if wanted.control else int(any(missed))


if __name__ == "__main__":
    sys.exit(main())

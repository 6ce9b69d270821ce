"""The saturated engine without HTTP: four mixes of lengths on one engine."""

from dataclasses import dataclass, replace

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.bounds import LLAMA_3_8B, optimal_tokens_per_s
from benchmarks.gpu.engine import asked, device_s, draw, engine_settings, open_engine
from tiercel.engine.offline import OfflineEngine
from tiercel.loadtest.load.request_list import digest, write_requests

SEQUENCES = 512
STEP_TOKENS = 8192
TRIAL_PROMPT, TRIAL_OUTPUT = 128, 32
_TIME_SHARE = 0.75  # of the remaining time, for one mix
_RATE_SHARE = 0.5  # of the rate in the trial, because longer contexts take longer


@dataclass(frozen=True, slots=True)
class Mix:
    """A number of requests of one length."""

    prompt: int
    output: int
    count: int

    @property
    def name(self) -> str:
        """The name in figures and files."""
        return f"{self.prompt}_{self.output}"

    @property
    def tokens(self) -> int:
        """Tokens of prompts and answers."""
        return self.count * (self.prompt + self.output)

    def within(self, tokens: float) -> "Mix":
        """Return the mix with as many requests as fit into `tokens`, at least one."""
        return replace(self, count=max(1, min(self.count, int(tokens / (self.prompt + self.output)))))


MIXES = (Mix(1024, 512, 704), Mix(512, 512, 576), Mix(128, 128, 1536), Mix(220, 190, 1280))
QUICK_MIXES = (Mix(1024, 512, 256), Mix(128, 128, 768))


def run(bench: Bench) -> None:
    """Figures `MIX.total_tokens_per_s`, `MIX.output_tokens_per_s`; the request lists are kept for a peer.

    On a slow engine a mix has fewer requests, because a figure of fewer requests is better than none.
    """
    flags = {"max_num_seqs": SEQUENCES, "max_num_batched_tokens": STEP_TOKENS, "max_model_len": 4096}
    with open_engine(engine_settings(bench.folder, **flags, kv_host_size="0")) as engine:
        facts = engine.facts
        bench.record("pool", facts.blocks * facts.block_size, "tokens", attention=facts.attention, dtype=facts.dtype)
        engine.run(asked(draw(engine, SEQUENCES, 64, 16, seed=99)))  # compiles kernels and allocates memory
        trial = Mix(TRIAL_PROMPT, TRIAL_OUTPUT, SEQUENCES)
        ran = engine.run(asked(draw(engine, trial.count, trial.prompt, trial.output, seed=98)))
        rate = _RATE_SHARE * trial.tokens / ran.elapsed_s
        for mix in QUICK_MIXES if bench.is_quick else MIXES:
            if bench.has_time(mix.name, 3.0):
                with bench.part(mix.name):
                    rate = measure(bench, engine, mix.within(_TIME_SHARE * bench.left_s * rate))


def measure(bench: Bench, engine: OfflineEngine, mix: Mix) -> float:
    """Run all requests of a mix at once. Return tokens per second."""
    requests = draw(engine, mix.count, mix.prompt, mix.output, seed=0)
    write_requests(bench.folder / f"requests-{mix.name}.jsonl", requests)
    ran = engine.run(asked(requests))
    elapsed_s, laps = ran.elapsed_s, ran.laps
    rate = mix.tokens / elapsed_s
    waiting_s = sum(laps.wait_s)
    bench.record(
        f"{mix.name}.total_tokens_per_s",
        rate,
        "tokens/s",
        requests=mix.count,
        is_saturating=mix.count >= SEQUENCES,
        seconds=elapsed_s,
        share_of_optimal=rate / optimal_tokens_per_s(LLAMA_3_8B),
        steps=len(laps.wait_s),
        host_not_waiting=1 - waiting_s / elapsed_s,
        device_busy=device_s(ran) / elapsed_s,
        preemptions=ran.after.preemptions - ran.before.preemptions,
        requests_sha256=digest(requests)[:12],
    )
    bench.record(f"{mix.name}.output_tokens_per_s", mix.count * mix.output / elapsed_s, "tokens/s")
    return rate

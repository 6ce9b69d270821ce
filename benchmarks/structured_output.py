"""The cost of grammars: of a mask, of the token rate of a batch, and of the time to the first token.

    python benchmarks/structured_output.py [--streams 16] [--tokens 96] [--pairs 6] [--firsts 20] [--folder FOLDER]
                                           [--delay-us 0]

Makes a Llama of 43 million random float32 weights with a trained tokenizer of 32,768 tokens, in --folder or a temporary
folder, and runs an engine on it in this process. Prints and checks:

- the median time per token of everything that a grammar adds to one row: mask, exclusion of tokens, taking in the token
  drawn, as the difference between a row with a grammar and one without. The tokens are drawn from random logits under
  four JSON schemas and a regular expression. Limit: 50 us.
- the token rate of --streams concurrent streams that all write long JSON objects, over that of as many streams without
  grammars, in interleaved pairs. The median pair has to reach 0.90.
- the time to the first token of one request with a schema that the engine has compiled before, less that of one without
  a schema, in interleaved pairs. Limit of the median: 5 ms.

Exit code 1 if a limit is broken. --delay-us 6000 delays the mask of every row by so much, and must break all three.
Run it on a quiet machine.
"""

import argparse
import json
import statistics
import sys
import sysconfig
import tempfile
from pathlib import Path

from tiercel.system.openmp import adopt_engine_environment

adopt_engine_environment()

import numpy as np  # noqa: E402 - OpenMP reads the environment when torch is loaded
import torch  # noqa: E402
from llguidance import LLMatcher  # noqa: E402
from numpy.typing import NDArray  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

from benchmarks.checks import missed_checks, percentile  # noqa: E402
from benchmarks.random_llama import random_llama  # noqa: E402
from tiercel.engine.native.library import load_library  # noqa: E402
from tiercel.engine.offline import OfflineEngine, OfflineRequest, OfflineRun  # noqa: E402
from tiercel.engine.sampling import Grammar, open_compiler, open_sampler  # noqa: E402
from tiercel.engine.sampling.grammar_rows import GrammarRows  # noqa: E402
from tiercel.settings.settings import EngineSettings  # noqa: E402
from tiercel.values.clock import MonotonicClock  # noqa: E402
from tiercel.values.request import SamplingParams, pack_tokens  # noqa: E402

VOCAB = 32_768
END_TOKENS = (0,)
CORPUS_CHARACTERS = 12_000_000
MOST_MASK_US, LEAST_RATE, MOST_FIRST_MS = 50.0, 0.90, 5.0
PROMPT_TOKENS = 64

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
    },
    "required": ["name", "age", "tags", "zip"],
    "additionalProperties": False,
}
SCHEMAS = (
    PERSON,
    {"type": "array", "items": PERSON, "minItems": 3, "maxItems": 6},
    {"type": "array", "items": {"type": "number"}, "minItems": 30, "maxItems": 40},
    {"type": "object", "additionalProperties": {"type": "string", "maxLength": 30}, "minProperties": 5},
)
LONG = {"type": "array", "items": PERSON, "minItems": 200}  # longer than any stream
REGEX = "([A-Z][a-z]{2,9} ){5,12}[0-9]{4}-[0-9]{2}-[0-9]{2}"


def grammar_of(schema: object) -> str:
    """Return the grammar of a JSON schema."""
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})


def make_model(folder: Path) -> None:
    """Write config.json and a tokenizer trained on Python's standard library, unless they are there."""
    if (folder / "tokenizer.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    fields = random_llama(
        vocab_size=VOCAB, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, eos_token_id=END_TOKENS[0],
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fields))
    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts and sum(map(len, texts)) < CORPUS_CHARACTERS:
            texts.append(path.read_text("utf-8", errors="replace"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<|end|>"], show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def mask_costs_us(folder: Path, outputs: int, clock: MonotonicClock) -> list[float]:
    """Return the time per token that grammars add to one row, over all schemas and several seeds."""
    compiler = open_compiler(folder, VOCAB, END_TOKENS)
    plain_row, row = 0, 1
    costs: list[float] = []
    for text in (*map(grammar_of, SCHEMAS), LLMatcher.grammar_from_regex(REGEX)):
        grammar = compiler.compile(text)
        if not isinstance(grammar, Grammar):
            raise SystemExit(grammar)
        for seed in range(3):
            sampler = open_sampler(2, VOCAB, torch.device("cpu"), torch.float32, load_library())
            sampler.set_row(plain_row, SamplingParams(seed=seed), b"", b"", END_TOKENS)
            sampler.set_row(row, SamplingParams(seed=seed, grammar=text), b"", b"", END_TOKENS, grammar)
            rng = torch.Generator().manual_seed(seed)
            for index in range(outputs):
                logits = torch.randn(1, VOCAB, generator=rng)
                start_s = clock.now_s()
                sampler.sample_no_sync(logits, [plain_row], [index], [index])
                plain_s = clock.now_s()
                token = sampler.sample_no_sync(logits, [row], [index], [index]).tokens
                failures = sampler.advance([row], token)
                costs.append(1e6 * (clock.now_s() - plain_s - (plain_s - start_s)))
                if failures:
                    raise SystemExit(failures[0][1])
                if token.item() in END_TOKENS:
                    break
    return costs


def requests(count: int, tokens: int, grammar: str, salt: int) -> list[OfflineRequest]:
    """Return requests with different prompts."""
    asked: list[OfflineRequest] = []
    for number in range(count):
        prompt = [1000 + (at * 7919 + number * 104_729 + salt * 31) % 30_000 for at in range(PROMPT_TOKENS)]
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=tokens, ignore_eos=True, grammar=grammar)
        asked.append(OfflineRequest(pack_tokens(prompt), params))
    return asked


def rate(run: OfflineRun) -> float:
    """Return tokens per second from the last first token to the last token."""
    start_s = max(answer.first_s for answer in run.answers)
    end_s = max(answer.last_s for answer in run.answers)
    return sum(len(answer.tokens) - 1 for answer in run.answers) / (end_s - start_s)


def main() -> int:
    """Measure, print and check. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--firsts", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--delay-us", type=float, default=0)
    arguments = parser.parse_args()
    if arguments.delay_us:
        delay_masks(arguments.delay_us)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        make_model(folder)
        return measure(folder, arguments)


def delay_masks(delay_us: float) -> None:
    """Delay the mask of every row from now on. This is the control: the limits must be broken."""
    words, clock = GrammarRows.words, MonotonicClock()

    def delayed(self: GrammarRows, row_ids: NDArray[np.int64]) -> NDArray[np.int32]:
        end_s = clock.now_s() + 1e-6 * delay_us * len(row_ids)
        while clock.now_s() < end_s:
            pass
        return words(self, row_ids)

    GrammarRows.words = delayed


def measure(folder: Path, arguments: argparse.Namespace) -> int:
    """Run the three measurements on a model folder. Return the exit code."""
    clock = MonotonicClock()
    costs = mask_costs_us(folder, 120, clock)
    settings = EngineSettings(
        model=str(folder), load_format="dummy", dtype="float32", threads=arguments.threads, max_num_seqs=32,
        num_gpu_blocks_override=1000, max_model_len=1024, calibration_s=0.0, enable_prefix_caching=False,
    )  # fmt: skip
    ratios: list[float] = []
    rates: dict[bool, list[float]] = {False: [], True: []}
    firsts: dict[bool, list[float]] = {False: [], True: []}
    text = grammar_of(LONG)
    with OfflineEngine.open(settings, clock) as engine:
        engine.run(requests(arguments.streams, 8, text, 0))
        run = engine.run(requests(arguments.streams, 8, "", 0))
        for pair in range(arguments.pairs):
            for is_constrained in (False, True) if pair % 2 else (True, False):
                asked = requests(arguments.streams, arguments.tokens, text if is_constrained else "", pair)
                rates[is_constrained].append(rate(engine.run(asked)))
            ratios.append(rates[True][-1] / rates[False][-1])
        for pair in range(arguments.firsts):
            for is_constrained in (False, True) if pair % 2 else (True, False):
                run = engine.run(requests(1, 2, text if is_constrained else "", pair))
                firsts[is_constrained].append(1e3 * run.answers[0].first_s)
        gauges = run.after.grammars
    later_ms = statistics.median(one - other for one, other in zip(firsts[True], firsts[False], strict=True))
    cost_us, ratio = statistics.median(costs), statistics.median(ratios)
    print(f"mask, exclusion and token: median {cost_us:.1f} us, p90 {percentile(costs, 0.9):.1f}, "
          f"p99 {percentile(costs, 0.99):.1f}, mean {statistics.mean(costs):.1f} ({len(costs)} tokens)")  # fmt: skip
    print(f"{arguments.streams} streams: {statistics.median(rates[True]):.0f} tokens/s constrained, "
          f"{statistics.median(rates[False]):.0f} unconstrained; ratios {' '.join(f'{one:.3f}' for one in ratios)}"
    )  # fmt: skip
    print(f"first token: {statistics.median(firsts[True]):.2f} ms constrained, "
          f"{statistics.median(firsts[False]):.2f} unconstrained, median difference {later_ms:.2f} ms")  # fmt: skip
    print(f"engine: {gauges.compiled} compiled in {1e3 * gauges.compile_s:.1f} ms, {gauges.hits} hits, "
          f"{gauges.masks} masks at {1e6 * gauges.mask_s / max(gauges.masks, 1):.1f} us on average")  # fmt: skip
    missed = missed_checks(
        (
            (f"a token costs {cost_us:.1f} us at the median, at most {MOST_MASK_US:.0f}", cost_us <= MOST_MASK_US),
            (f"constrained streams reach {ratio:.3f} of the token rate, at least {LEAST_RATE}", ratio >= LEAST_RATE),
            (f"the first token is {later_ms:.2f} ms later, at most {MOST_FIRST_MS}", later_ms <= MOST_FIRST_MS),
        )
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

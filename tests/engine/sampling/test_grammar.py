"""Rows with grammars: what they may draw, compared with all words of a small language."""

import itertools
import json
import random
import tempfile
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer

from tests.engine.sampling.rows import random_logits, random_params
from tests.engine.small_grammars import END_TOKEN, LETTERS, compiled, small_compiler, text_of, token_of, write_tokenizer
from tests.seeds import fresh_seeds
from tiercel.embedded import MODEL_DIR
from tiercel.engine.native.library import load_library
from tiercel.engine.sampling import (
    Failures,
    Grammar,
    GrammarCompiler,
    GrammarRow,
    Sampler,
    advance,
    open_compiler,
    open_sampler,
)
from tiercel.engine.sampling.grammar_rows import GrammarRows
from tiercel.engine.sampling.masks import can_draw_others, exclude_no_sync, excluded_no_sync
from tiercel.values.clock import ManualClock, MonotonicClock
from tiercel.values.errors import ConfigError
from tiercel.values.grammar import GrammarLimits
from tiercel.values.grammar_words import TOO_LARGE
from tiercel.values.request import SamplingParams, pack_tokens

VOCAB = len(LETTERS) + 1
CPU = torch.device("cpu")
REGEX = "(ab|ce){1,3}(f|gh)?"
WORDS = {
    "".join(parts) + end
    for count in (1, 2, 3)
    for parts in itertools.product(("ab", "ce"), repeat=count)
    for end in ("", "f", "gh")
}
TEXT = LLMatcher.grammar_from_regex(REGEX)
GREEDY = SamplingParams(temperature=0.0, grammar=TEXT)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def allowed_after(said: str) -> set[int]:
    """Return the tokens that may follow these letters."""
    if said.endswith("."):
        return {END_TOKEN}
    tokens = {token_of(word[len(said)]) for word in WORDS if word.startswith(said) and word != said}
    return tokens | {END_TOKEN} if said in WORDS else tokens


def draw(sampler: Sampler, logits: torch.Tensor, rows: list[int], said: list[list[int]]) -> list[int]:
    """Draw one token for each row, and append it to the row's output."""
    lengths = [len(tokens) for tokens in said]
    sampled = sampler.sample_no_sync(logits, rows, [5 + length for length in lengths], lengths)
    assert sampler.advance(rows, sampled.tokens) == ()
    for tokens, token in zip(said, sampled.tokens.tolist(), strict=True):
        tokens.append(token)
    return sampled.tokens.tolist()


@pytest.mark.parametrize("seed", [1, 2, *fresh_seeds(2)])
def test_the_largest_score_of_the_allowed_tokens_is_drawn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    params = [GREEDY if row % 3 else SamplingParams(temperature=0.0) for row in range(8)]
    sampler = Sampler(8, VOCAB, CPU)
    for row, each in enumerate(params):
        sampler.set_row(row, each, b"", b"", (END_TOKEN,), compiled(TEXT) if each.grammar else None)
    said: list[list[int]] = [[] for _ in params]
    for _ in range(10):
        logits = random_logits(int(rng.integers(2**31)), 8, VOCAB)
        for row, token in enumerate(draw(sampler, logits, list(range(8)), said)):
            allowed = allowed_after(text_of(said[row][:-1])) if params[row].grammar else set(range(VOCAB))
            assert token == max(allowed, key=lambda one: logits[row, one].item())


@pytest.mark.parametrize("seed", [3, *fresh_seeds(2)])
@pytest.mark.parametrize("kernels", [False, True])
def test_rows_with_every_other_feature_draw_allowed_tokens_and_leave_their_neighbours_alone(
    seed: int, kernels: bool
) -> None:
    rng = np.random.default_rng(seed)
    library = load_library() if kernels else None
    if kernels and library is None:
        pytest.skip("no native kernels")
    count = 24
    plain = [random_params(rng, VOCAB, greedy=bool(rng.random() < 0.3)) for _ in range(count)]
    is_free = rng.random(count) < 0.4
    mixed, alone = (open_sampler(count, VOCAB, CPU, torch.float32, library) for _ in range(2))
    prompts = [pack_tokens(rng.integers(0, VOCAB, 5).tolist()) for _ in plain]
    for row, each in enumerate(plain):
        asked = each if is_free[row] else with_grammar(each)
        mixed.set_row(row, asked, prompts[row], b"", (END_TOKEN,), None if is_free[row] else compiled(TEXT))
        alone.set_row(row, each, prompts[row], b"", (END_TOKEN,))
    said: list[list[int]] = [[] for _ in plain]
    free = np.flatnonzero(is_free).tolist()
    for step in range(8):
        logits = random_logits(int(rng.integers(2**31)), count, VOCAB)
        positions, lengths = [5 + step] * count, [step] * count
        sampled = mixed.sample_no_sync(logits, list(range(count)), positions, lengths)
        assert mixed.advance(list(range(count)), sampled.tokens) == ()
        if free:
            beside = alone.sample_no_sync(logits[free], free, [5 + step] * len(free), [step] * len(free))
            assert torch.equal(beside.tokens, sampled.tokens[free])
        for row, token in enumerate(sampled.tokens.tolist()):
            if not is_free[row]:
                assert token in allowed_after(text_of(said[row])), (row, plain[row])
            said[row].append(token)


def with_grammar(params: SamplingParams) -> SamplingParams:
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    # Lists of tokens may exclude all that the grammar allows; such a request fails.
    return SamplingParams(**{**fields, "grammar": TEXT, "bad_words": (), "allowed_token_ids": ()})


def test_a_resumed_row_goes_on_as_the_row_would_have() -> None:
    asked = SamplingParams(temperature=1.0, seed=4, grammar=TEXT)
    whole, resumed = Sampler(1, VOCAB, CPU), Sampler(3, VOCAB, CPU)
    whole.set_row(0, asked, b"", b"", (END_TOKEN,), compiled(TEXT))
    said: list[list[int]] = [[]]
    for step in range(12):
        resumed.set_row(2, asked, b"", pack_tokens(said[0]), (END_TOKEN,), compiled(TEXT))
        logits = random_logits(step, 1, VOCAB)
        again = resumed.sample_no_sync(logits, [2], [5 + step], [step]).tokens.tolist()
        assert draw(whole, logits, [0], said) == again
    assert text_of(said[0]).strip(".") in WORDS and said[0].count(END_TOKEN) >= 1


def test_a_row_is_free_when_a_sequence_without_a_grammar_takes_it() -> None:
    sampler = Sampler(1, VOCAB, CPU)
    logits = torch.eye(VOCAB)[[token_of("j")]]
    sampler.set_row(0, GREEDY, b"", b"", (END_TOKEN,), compiled(TEXT))
    assert draw(sampler, logits, [0], [[]]) == [token_of("a")]
    sampler.set_row(0, SamplingParams(temperature=0.0), b"", b"", (END_TOKEN,))
    assert draw(sampler, logits, [0], [[]]) == [token_of("j")]


def test_a_complete_output_is_ended_even_before_min_tokens() -> None:
    sampler = Sampler(1, VOCAB, CPU)
    asked = SamplingParams(temperature=0.0, min_tokens=9, stop_token_ids=(token_of("j"),), grammar=TEXT)
    said: list[list[int]] = [[]]
    sampler.set_row(0, asked, b"", b"", (END_TOKEN,), compiled(TEXT))
    prefers_end = torch.eye(VOCAB)[[END_TOKEN]]
    for _ in range(8):
        draw(sampler, prefers_end, [0], said)
    assert text_of(said[0]) == "abababf."  # an end is banned while anything else is allowed


def test_every_end_token_of_the_model_may_end_the_output() -> None:
    compiler = open_compiler(MODEL_DIR, 1800, (0, 2))
    grammar = compiler.compile(LLMatcher.grammar_from_regex("a"))
    assert isinstance(grammar, Grammar)
    row = grammar.open_row()
    words = np.zeros(-(-1800 // 32), np.int32)
    row.fill(words)
    (letter,) = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    row.advance(letter)
    row.fill(words)
    assert np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist() == [0, 2]
    for token in (2, 0, 2):  # ignore_eos: ends may follow the end
        row.advance(token)
        row.fill(words)
        assert np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist() == [0, 2]
    assert not row.error


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    logits = random_logits(5, 2, VOCAB)
    sampler = Sampler(2, VOCAB, CPU)
    for row, text in enumerate((TEXT, "")):
        asked = SamplingParams(temperature=0.0, logprobs=3, grammar=text)
        sampler.set_row(row, asked, b"", b"", (END_TOKEN,), compiled(text) if text else None)
    found = sampler.sample_no_sync(logits, [0, 1], [5, 5], [0, 0]).logprobs
    assert found is not None
    assert torch.equal(found.top_tokens, logits.topk(3).indices)
    torch.testing.assert_close(found.top_logprobs, logits.log_softmax(-1).topk(3).values)


def test_a_grammar_that_exceeds_a_limit_fails_its_row_alone() -> None:
    compiler = GrammarCompiler(tokenizer_of_embedded(), GrammarLimits(max_lexer_states=60))
    text = LLMatcher.grammar_from_regex("[a-z]{30}[0-9]{200}x")
    grammar = compiler.compile(text)
    assert isinstance(grammar, Grammar)
    sampler = Sampler(2, 1792, CPU)
    sampler.set_row(0, SamplingParams(temperature=0.0, grammar=text), b"", b"", (2,), grammar)
    sampler.set_row(1, SamplingParams(temperature=0.0), b"", b"", (2,))
    failed = ""
    for step in range(60):
        logits = random_logits(step, 2, 1792)
        sampled = sampler.sample_no_sync(logits, [0, 1], [5 + step] * 2, [step] * 2)
        assert sampled.tokens[1] == logits[1].argmax()
        assert not sampled.bad_rows.any()
        for index, why in sampler.advance([0, 1], sampled.tokens):
            assert index == 0
            failed = why
        if failed:
            break
    assert failed == TOO_LARGE


def test_a_token_that_the_grammar_excludes_fails_the_row() -> None:
    row = compiled(TEXT).open_row([token_of("a")])
    row.advance(token_of("c"))
    assert row.error
    words = np.zeros(1, np.int32)
    row.fill(words)
    assert words.tolist() == [-1]
    assert compiled(TEXT).open_row([token_of("j"), token_of("a")]).error


@pytest.mark.parametrize("rule", ['e e | "a"', 'e e e | e e | "a" | "b"', 'e e | "a" | '])
def test_an_ambiguous_grammar_fails_its_row_before_it_holds_up_the_others(rule: str) -> None:
    row = compiled(f"%llguidance {{}}\nstart: e\ne: {rule}\n").open_row()
    words = np.zeros(1, np.int32)
    for _ in range(4_000):  # would take hours
        row.fill(words)
        row.advance(token_of("a"))
    assert "too much time" in row.error
    assert words.tolist() == [-1]


def _tokenizer() -> LLTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return LLTokenizer(str(Path(folder) / "tokenizer.json"), n_vocab=VOCAB, eos_token=[END_TOKEN])


def test_the_time_of_a_row_grows_with_its_tokens() -> None:
    now_s = itertools.count(step=0.00075)  # a mask and a token take 1.5 ms together
    matcher = LLMatcher(_tokenizer(), LLMatcher.grammar_from_regex("a*"))
    row = GrammarRow(matcher, 1, wall_s=lambda: next(now_s), cpu_s=lambda: next(now_s))
    words = np.zeros(1, np.int32)
    for count in range(390):  # 0.1 s twice: on the wall clock and of the processor
        assert row.is_quick == (count < 200) or abs(count - 200) < 3
        row.fill(words)
        row.advance(token_of("a"))
        assert not row.error
    for _ in range(30):
        row.fill(words)
        row.advance(token_of("a"))
    assert row.error


def test_a_row_that_waited_for_a_busy_machine_goes_on() -> None:
    now_s = itertools.count(step=1.0)
    matcher = LLMatcher(_tokenizer(), LLMatcher.grammar_from_regex("a*"))
    row = GrammarRow(matcher, 1, wall_s=lambda: next(now_s), cpu_s=lambda: 0.0)
    words = np.zeros(1, np.int32)
    for _ in range(500):
        row.fill(words)
        row.advance(token_of("a"))
    assert not row.error


@pytest.mark.parametrize("seed", [1, *fresh_seeds(2)])
def test_masks_computed_together_are_those_computed_alone(seed: int) -> None:
    rng = random.Random(seed)
    rows = GrammarRows(12, VOCAB, ManualClock())
    alone: list[GrammarRow] = []
    for index in range(12):
        said = "".join(rng.choice(sorted(WORDS))[: rng.randrange(5)])
        tokens = [token_of(letter) for letter in said]
        rows.set_row(index, compiled(TEXT), np.array(tokens, np.uint32))
        alone.append(compiled(TEXT).open_row(tokens))
    order = rng.sample(range(12), rng.randrange(2, 12))
    together = rows.words(np.array(order))
    for line, index in zip(together, order, strict=True):
        words = np.zeros(1, np.int32)
        alone[index].fill(words)
        assert words.tolist() == line.tolist()
    assert rows.num_masks == len(order)


def test_an_ambiguous_grammar_among_others_is_found_and_fails_alone() -> None:
    torch.set_num_threads(2)
    rows = GrammarRows(3, VOCAB, MonotonicClock())
    none = np.zeros(0, np.uint32)
    rows.set_row(0, compiled(LLMatcher.grammar_from_regex("a*")), none)
    rows.set_row(1, compiled('%llguidance {}\nstart: e\ne: e e | "a"\n'), none)
    rows.set_row(2, compiled(LLMatcher.grammar_from_regex("a*")), none)
    row_ids = np.arange(3)
    failures: Failures = ()
    for _ in range(4_000):  # would take hours
        assert rows.words(row_ids)[:, 0].tolist()[::2] == [1 << END_TOKEN | 1 << token_of("a")] * 2
        failures = advance(rows.take(row_ids), [token_of("a")] * 3)
        if failures:
            break
    assert [index for index, _ in failures] == [1]


def test_a_row_whose_grammar_is_missing_fails() -> None:
    sampler = Sampler(1, VOCAB, CPU)
    sampler.set_row(0, GREEDY, b"", b"", (END_TOKEN,), None)
    sampled = sampler.sample_no_sync(random_logits(1, 1, VOCAB), [0], [5], [0])
    assert sampler.advance([0], sampled.tokens) == ((0, "it is not compiled"),)


@pytest.mark.parametrize("text", ["{", "start: %%%", LLMatcher.grammar_from_regex("(("), '{"grammars": 3}'])
def test_a_bad_grammar_is_refused_with_a_message(text: str) -> None:
    error = small_compiler().compile(text)
    assert isinstance(error, str) and error and "<non-verbose/>" not in error


@pytest.mark.parametrize("vocab_size", [1792, 1800, 1803])
def test_bits_become_excluded_tokens_alike_on_the_host_and_on_a_device(vocab_size: int) -> None:
    words = np.random.default_rng(vocab_size).integers(-(2**31), 2**31, (5, -(-vocab_size // 32)), np.int32)
    scores = torch.zeros(5, vocab_size)
    exclude_no_sync(scores, words)
    on_device = excluded_no_sync(torch.from_numpy(words.view(np.uint8)), vocab_size)
    assert torch.equal(scores == -torch.inf, on_device)
    for token in (0, 31, 32, vocab_size - 1):
        allowed = (words[:, token // 32] >> (token % 32)) & 1
        assert torch.equal(scores[:, token] == 0, torch.from_numpy(allowed == 1))


@pytest.mark.parametrize("seed", fresh_seeds(3))
def test_bans_are_lifted_only_where_nothing_else_can_be_drawn(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        allowed, banned = (set(rng.sample(range(64), rng.randrange(4))) for _ in range(2))
        words = np.zeros(2, np.int32)
        for token in allowed:
            words[token // 32] |= np.int32(np.uint32(1 << (token % 32)).view(np.int32))
        assert can_draw_others(words, np.array(sorted(banned), np.int64)) == bool(allowed - banned)


@pytest.mark.parametrize("vocab_size", [8, 11, 40])
def test_a_model_may_have_fewer_logits_than_the_tokenizer_has_tokens_or_more(vocab_size: int, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    text = LLMatcher.grammar_from_regex("[a-j]")
    grammar = open_compiler(tmp_path, vocab_size, (END_TOKEN,)).compile(text)
    assert isinstance(grammar, Grammar)
    sampler = Sampler(1, vocab_size, CPU)
    for token in range(vocab_size):
        sampler.set_row(0, SamplingParams(temperature=0.0, grammar=text), b"", b"", (END_TOKEN,), grammar)
        drawn = sampler.sample_no_sync(torch.eye(vocab_size)[[token]], [0], [5], [0]).tokens.item()
        assert drawn == (token if token < 11 and token != END_TOKEN else 0)


def test_a_model_without_a_readable_tokenizer_or_end_tokens_has_no_grammars(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        open_compiler(tmp_path, 11, (3,))
    write_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="no eos_token_id"):
        open_compiler(tmp_path, 11, ())
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        open_compiler(tmp_path, 11, (3,))


def tokenizer_of_embedded() -> LLTokenizer:
    return LLTokenizer(str(MODEL_DIR / "tokenizer.json"), eos_token=[2])


@pytest.mark.parametrize("seed", fresh_seeds(2))
def test_random_logits_under_a_schema_give_valid_json(seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
    text = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})
    tokenizer = tokenizer_of_embedded()
    grammar = GrammarCompiler(tokenizer).compile(text)
    assert isinstance(grammar, Grammar)
    rows = list(range(16))
    sampler = Sampler(16, 1792, CPU)
    for row in rows:
        sampler.set_row(row, SamplingParams(seed=seed + row, grammar=text), b"", b"", (2,), grammar)
    said: list[list[int]] = [[] for _ in rows]
    for step in range(80):
        draw(sampler, random_logits(seed + step, 16, 1792, spread=1.0), rows, said)
    for tokens in said:
        assert 2 in tokens
        output = tokenizer.decode_str(tokens[: tokens.index(2)])
        jsonschema.validate(json.loads(output), schema)

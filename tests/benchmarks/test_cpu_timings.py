"""Figures and prompts of the workloads in benchmarks/cpu, from made-up times."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.cpu.prompts import Prompts
from benchmarks.cpu.timings import AnswerTimes, beside_streams, faults, gaps, gaps_during, throughput
from tests.seeds import fresh_seeds


def answer(times_s: list[float], *, sent_s: float = 0.0, wanted: int | None = None) -> AnswerTimes:
    """Return an answer with one token at each time."""
    tokens = len(times_s) if wanted is None else wanted
    end_s = times_s[-1] if times_s else sent_s
    return AnswerTimes(
        prompt_tokens=4, wanted=tokens, sent_s=sent_s, texts_s=times_s, events_s=times_s, end_s=end_s
    )  # fmt: skip


def test_streams_at_once_count_from_the_first_request_to_the_last_end() -> None:
    found = throughput([answer([1.0, 2.0]), answer([1.0, 4.0], sent_s=0.5)], one_by_one=False)
    assert found["out_tok_s"] == 4 / 4.0
    assert found["ttft_p50_s"] == 0.5
    assert found["ttft_p99_s"] == 1.0
    assert found["itl_p99_s"] == 3.0
    assert found["tpot_p50_s"] == 2.0


def test_pauses_between_streams_one_after_another_do_not_count() -> None:
    found = throughput([answer([1.0, 2.0]), answer([101.0, 102.0], sent_s=100.0)], one_by_one=True)
    assert found["out_tok_s"] == 4 / 4.0


def test_gaps_are_between_chunks() -> None:
    assert gaps(answer([1.0, 1.5, 3.0])) == [0.5, 1.5]
    assert gaps(answer([])) == gaps(answer([1.0])) == []


def test_gaps_during_an_interval_are_whole_and_silence_until_its_end_counts() -> None:
    one = answer([1.0, 2.0, 5.0, 6.0, 9.0])
    assert gaps_during(one, 2.5, 5.5) == [3.0, 1.0]
    assert gaps_during(one, 2.5, 12.0) == [3.0, 1.0, 3.0, 3.0]
    assert gaps_during(answer([1.0, 2.0]), 3.0, 20.0) == [18.0]


def test_a_long_prompt_beside_streams() -> None:
    streams = [answer([1.0, 1.1, 1.2, 1.3, 3.3, 3.4]), answer([1.0, 1.2, 1.4, 3.4])]
    found = beside_streams(streams, answer([3.35, 3.4], sent_s=1.35))
    assert found["long_ttft_s"] == pytest.approx(2.0)
    assert found["long_prefill_tok_s"] == pytest.approx(2.0)
    assert found["gap_max_s"] == pytest.approx(2.0)
    assert found["gap_max_before_s"] == pytest.approx(0.2)
    assert found["gap_p50_before_s"] == pytest.approx(0.1)
    assert found["tokens_during"] == 4


def test_chunks_without_text_shorten_gaps_but_are_no_first_token() -> None:
    one = answer([1.0, 2.0, 3.0])
    one.texts_s = [2.0, 3.0]
    assert one.ttft_s == 2.0
    assert max(gaps(one)) == 1.0


def test_faults_name_wrong_lengths_and_errors() -> None:
    good = answer([1.0, 2.0])
    good.counted_prompt, good.counted_output = 4, 2
    short = answer([1.0, 2.0], wanted=3)
    miscounted = answer([1.0])
    miscounted.counted_prompt = 5
    cut = answer([1.0], wanted=9)
    cut.is_cut = True
    failed = answer([1.0])
    failed.error = "HTTP 500"
    assert faults([good, cut]) == []
    assert faults([short]) == ["request 1: 3 tokens requested, 2 received"]
    assert faults([good, miscounted]) == ["request 2: 4 prompt tokens sent, 5 counted"]
    assert faults([failed]) == ["request 1: HTTP 500"]
    assert faults([answer([])]) == ["request 1: no text arrived"]


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [" the way of all words over there " * 5, " some others are only here " * 5]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return Prompts(tokenizer)


@pytest.mark.parametrize("seed", [1, *fresh_seeds(1)])
def test_prompts_have_exact_lengths_also_when_joined(prompts: Prompts, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        first, second = rng.randrange(1, 200), rng.randrange(1, 200)
        text = prompts.text(first, f"{seed}/a") + prompts.text(second, f"{seed}/b")
        assert prompts.count(text) == first + second


def test_a_prompt_depends_on_its_key_only(prompts: Prompts) -> None:
    assert prompts.text(30, "a") == prompts.text(30, "a")
    assert prompts.text(30, "a") != prompts.text(30, "b")

"""The datasets: lengths, filters, and the same prompts for the same seed."""

import json
from pathlib import Path

import pytest

from tests.loadtest.builders import texts
from tiercel.loadtest.load.conversation import Conversation
from tiercel.loadtest.load.datasets.dataset import DatasetQuery
from tiercel.loadtest.load.datasets.registry import NAMES, conversations
from tiercel.loadtest.load.mix import DatasetSettings
from tiercel.values.errors import ConfigError


def _ask(settings: DatasetSettings, count: int = 20, seed: str = "1") -> list[Conversation]:
    return conversations(DatasetQuery(settings, count, seed, texts()))


def _words(conversation: Conversation, turn: int = 0) -> list[str]:
    return conversation.turns[turn].prompt.split()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Write a small file for each dataset that needs one."""
    output = [
        {"conversations": [{"from": "human", "value": "one two three four five six"}, {"value": "a b c d e"}]},
        {"conversations": [{"value": "too short"}, {"value": "a b c d e"}]},
        {"conversations": [{"value": "only one turn of many words"}]},
        {"conversations": [{"value": "w " * 1200}, {"value": "a b c d"}]},
        {"conversations": [{"value": f"q{turn} w w w w"} for turn in range(6)]},
    ]
    trace = [
        {"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [4, 5]},
        {"timestamp": 2500, "input_length": 1030, "output_length": 0, "hash_ids": [4, 6, 7]},
    ]
    rows = ["1,GPT-4,5,3", "2,Other,9,9", "4,GPT-4,6,0", "7,GPT-4,7,2"]
    texts_by_name = {
        "sharegpt": json.dumps(output),
        "custom": '{"prompt": "a b c", "output_tokens": 9}\n\n{"prompt": "d"}\n',
        "burstgpt": "\n".join(["Timestamp,Model,Request tokens,Response tokens", *rows]),
        "timed_trace": "\n".join(json.dumps(line) for line in trace),
        "sonnet": "one line of verse\nanother line of verse here\n",
    }
    for name, text in texts_by_name.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return {name: str(tmp_path / name) for name in texts_by_name}


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_the_same_prompts_again(name: str, files: dict[str, str]) -> None:
    settings = DatasetSettings(name=name, path=files.get(name), input_len=64, output_len=8)  # type: ignore[arg-type]
    assert _ask(settings) == _ask(settings)
    if name in ("random", "multi_turn", "prefix_repetition", "sonnet", "timed_trace"):
        assert _ask(settings) != _ask(settings, seed="2")


@pytest.mark.parametrize("name", ["random", "multi_turn", "prefix_repetition", "burstgpt", "timed_trace"])
def test_other_words_keep_the_lengths_and_times(name: str, files: dict[str, str]) -> None:
    settings = DatasetSettings(name=name, path=files.get(name), input_len=64, range_ratio=0.5)  # type: ignore[arg-type]
    first = conversations(DatasetQuery(settings, 5, "1", texts()))
    second = conversations(DatasetQuery(settings, 5, "1", texts(), "other"))

    def shapes(found: list[Conversation]) -> list[object]:
        return [
            (each.recorded_s, [(turn.input_tokens, turn.output_tokens, turn.think_s) for turn in each.turns])
            for each in found
        ]

    assert shapes(first) == shapes(second)
    prompts = {turn.prompt for each in (*first, *second) for turn in each.turns}
    assert len(prompts) == 2 * sum(len(each.turns) for each in first)


def test_random_prompts_have_their_lengths_and_share_their_prefix() -> None:
    found = _ask(DatasetSettings(input_len=100, output_len=50, range_ratio=0.2, prefix_len=7), 200)
    for conversation in found:
        turn = conversation.turns[0]
        assert len(_words(conversation)) == turn.input_tokens
        assert 87 <= turn.input_tokens <= 127
        assert 40 <= turn.output_tokens <= 60
        assert _words(conversation)[:7] == _words(found[0])[:7]
    assert len({conversation.turns[0].prompt for conversation in found}) == 200


def test_prefix_repetition_asks_each_prefix_equally_often() -> None:
    found = _ask(DatasetSettings(name="prefix_repetition", prefix_len=9, suffix_len=4, num_prefixes=5, output_len=3))
    prefixes = [tuple(_words(conversation)[:9]) for conversation in found]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [4] * 5
    assert {len(_words(conversation)) for conversation in found} == {13}


def test_sharegpt_omits_short_and_long_conversations(files: dict[str, str]) -> None:
    found = _ask(DatasetSettings(name="sharegpt", path=files["sharegpt"]))
    assert sorted((turn.input_tokens, turn.output_tokens) for (turn,) in (c.turns for c in found)) == [(5, 5), (6, 5)]
    fixed = _ask(DatasetSettings(name="sharegpt", path=files["sharegpt"], output_len=77))
    assert {conversation.turns[0].output_tokens for conversation in fixed} == {77}


def test_custom_prompts_come_as_they_are(files: dict[str, str]) -> None:
    found = _ask(DatasetSettings(name="custom", path=files["custom"]))
    assert [(turn.prompt, turn.input_tokens, turn.output_tokens) for (turn,) in (c.turns for c in found)] == [
        ("a b c", 3, 9),
        ("d", 1, 128),
    ]


def test_burstgpt_keeps_answered_requests_to_gpt_4(files: dict[str, str]) -> None:
    found = _ask(DatasetSettings(name="burstgpt", path=files["burstgpt"]))
    assert [(len(_words(c)), c.turns[0].output_tokens, c.recorded_s) for c in found] == [(5, 3, 1.0), (7, 2, 7.0)]


def test_a_trace_shares_the_blocks_that_its_hash_ids_share(files: dict[str, str]) -> None:
    first, second = _ask(DatasetSettings(name="timed_trace", path=files["timed_trace"]))
    assert [first.recorded_s, second.recorded_s] == [0.0, 2.5]
    assert (len(_words(first)), len(_words(second))) == (600, 1030)
    assert _words(first)[:512] == _words(second)[:512]
    assert _words(first)[512:] != _words(second)[512:600]
    assert second.turns[0].output_tokens == 1


@pytest.mark.parametrize("with_file", [False, True])
def test_sonnets_fit_and_share_their_first_lines(files: dict[str, str], with_file: bool) -> None:
    path = files["sonnet"] if with_file else None
    found = _ask(DatasetSettings(name="sonnet", path=path, input_len=100, prefix_len=40, output_len=5))
    for conversation in found:
        assert 88 <= len(_words(conversation)) == conversation.turns[0].input_tokens <= 100
        assert _words(conversation)[:30] == _words(found[0])[:30]


def test_a_prefix_of_no_tokens_is_not_the_default() -> None:
    found = _ask(DatasetSettings(name="sonnet", prefix_len=0))
    assert len({_words(conversation)[15] for conversation in found}) > 1
    found = _ask(DatasetSettings(name="prefix_repetition", prefix_len=0))
    assert len({_words(conversation)[0] for conversation in found}) > 10


def test_all_turns_but_the_first_are_sent_after_a_pause() -> None:
    found = _ask(DatasetSettings(name="multi_turn", turns=5, think_s=2.0, input_len=4, output_len=3), 400)
    assert {len(conversation.turns) for conversation in found} == {5}
    assert all(conversation.turns[0].think_s == 0 for conversation in found)
    pauses = [turn.think_s for conversation in found for turn in conversation.turns[1:]]
    assert sum(pauses) / len(pauses) == pytest.approx(2.0, rel=0.1)


def test_recorded_conversations_are_sent_turn_by_turn(files: dict[str, str]) -> None:
    (found,) = _ask(DatasetSettings(name="multi_turn", path=files["sharegpt"]))
    assert [turn.prompt.split()[0] for turn in found.turns] == ["q0", "q2", "q4"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("sharegpt", "{}", "not a list"),
        ("sharegpt", "[]", "no usable request"),
        ("sharegpt", "[", "truncated"),
        ("custom", '{"prompt": 3}', "line 1: needs a text `prompt`"),
        ("custom", "[]", "line 1: not an object"),
        ("burstgpt", "Model,Request tokens\nGPT-4,3", "no column 'Response tokens'"),
        ("burstgpt", "Model,Request tokens,Response tokens\nGPT-4,x,3", "invalid literal"),
        ("timed_trace", '{"timestamp": 1}', "line 1: Object missing required field"),
        ("sonnet", "\n", "no lines"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_and_the_reason(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    path = tmp_path / "file"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        _ask(DatasetSettings(name=name, path=str(path)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="No such file"):
        _ask(DatasetSettings(name=name, path=str(tmp_path / "none")))  # type: ignore[arg-type]

"""Request lists: drawing, writing, reading, and errors that name the line."""

import hashlib
import json
from pathlib import Path

import pytest

from tiercel.embedded import MODEL_DIR
from tiercel.loadtest.load.mix import DatasetName, DatasetSettings
from tiercel.loadtest.load.request_list import (
    ListedRequest,
    digest,
    draw_like,
    draw_requests,
    read_requests,
    write_requests,
)
from tiercel.values.errors import ConfigError

NOWHERE = Path("/nowhere")


def lengths(requests: list[ListedRequest]) -> list[tuple[int, int]]:
    return [(len(request.prompt_token_ids), request.output_len) for request in requests]


def test_a_written_list_is_read_again_and_its_digest_is_that_of_the_file(tmp_path: Path) -> None:
    requests = draw_requests(DatasetSettings(input_len=9, output_len=3), 4, 0, 100, NOWHERE)
    path = tmp_path / "list.jsonl"
    write_requests(path, requests)
    assert read_requests(path) == requests
    assert digest(requests) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert json.loads(path.read_text().splitlines()[0]).keys() == {"prompt_token_ids", "output_len"}


def test_random_requests_have_exact_lengths_and_depend_on_the_seed_alone() -> None:
    settings = DatasetSettings(input_len=40, output_len=7, prefix_len=5)
    requests = draw_requests(settings, 6, 1, 200_000, NOWHERE)
    assert lengths(requests) == [(45, 7)] * 6
    assert len({tuple(request.prompt_token_ids[:5]) for request in requests}) == 1
    assert len({tuple(request.prompt_token_ids[5:]) for request in requests}) == 6
    assert all(0 <= token < 200_000 for request in requests for token in request.prompt_token_ids)
    assert requests == draw_requests(settings, 6, 1, 200_000, NOWHERE)
    assert requests != draw_requests(settings, 6, 2, 200_000, NOWHERE)


def test_lengths_vary_on_request() -> None:
    settings = DatasetSettings(input_len=100, output_len=50, range_ratio=0.5)
    found = lengths(draw_requests(settings, 40, 0, 50, NOWHERE))
    assert len(set(found)) > 20
    assert all(50 <= prompt <= 150 and 25 <= output <= 75 for prompt, output in found)


def test_warming_up_uses_the_same_lengths_and_other_tokens() -> None:
    requests = draw_requests(DatasetSettings(input_len=30, output_len=4), 3, 0, 1000, NOWHERE)
    warm = draw_like(requests, 0, 1000)
    assert lengths(warm) == lengths(requests)
    assert all(one.prompt_token_ids != other.prompt_token_ids for one, other in zip(warm, requests, strict=True))


def test_prefixes_and_traces_are_drawn_without_a_tokenizer(tmp_path: Path) -> None:
    settings = DatasetSettings(name="prefix_repetition", prefix_len=20, suffix_len=10, num_prefixes=2, output_len=5)
    requests = draw_requests(settings, 8, 0, 1000, NOWHERE)
    assert lengths(requests) == [(30, 5)] * 8
    assert len({tuple(request.prompt_token_ids[:20]) for request in requests}) == 2
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 1000, "output_length": 6, "hash_ids": [1, 2]}) + "\n")
    assert lengths(draw_requests(DatasetSettings(name="timed_trace", path=str(trace)), 3, 0, 1000, NOWHERE)) == [
        (1000, 6)
    ]
    table = tmp_path / "burst.csv"
    table.write_text("Timestamp,Model,Request tokens,Response tokens\n5,GPT-4,70,8\n")
    assert lengths(draw_requests(DatasetSettings(name="burstgpt", path=str(table)), 3, 0, 1000, NOWHERE)) == [(70, 8)]


def test_texts_of_a_file_go_through_the_tokenizer_of_the_model(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"prompt": "The code of Anna is 4821.", "output_tokens": 9}) + "\n")
    settings = DatasetSettings(name="custom", path=str(file))
    (request,) = draw_requests(settings, 5, 0, 10, MODEL_DIR)
    assert request.output_len == 9
    assert len(request.prompt_token_ids) > 3
    with pytest.raises(ConfigError, match=r"--dataset-name custom needs a tokenizer.*no tokenizer\.json"):
        draw_requests(settings, 5, 0, 10, tmp_path)


@pytest.mark.parametrize("name", ["sharegpt", "sonnet"])
def test_recorded_questions_and_poems_become_token_ids(name: DatasetName, tmp_path: Path) -> None:
    file = tmp_path / "said.json"
    turns = [{"value": "Who is Anna, and what is her code?"}, {"value": "Anna is somebody with the code 4821."}]
    file.write_text(json.dumps([{"conversations": turns}]) if name == "sharegpt" else "A line of a poem.\n" * 4)
    settings = DatasetSettings(name=name, path=str(file), input_len=60, output_len=5, prefix_len=30)
    requests = draw_requests(settings, 1, 0, 10, MODEL_DIR)
    assert requests[0].output_len == 5
    assert len(requests[0].prompt_token_ids) > 4


def test_conversations_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--dataset-name multi_turn"):
        draw_requests(DatasetSettings(name="multi_turn"), 5, 0, 10, MODEL_DIR)


def test_a_prompt_of_no_tokens_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"prompt": ""}) + "\n")
    with pytest.raises(ConfigError, match=r"custom.*prompt_token_ids is empty"):
        draw_requests(DatasetSettings(name="custom", path=str(file)), 5, 0, 10, MODEL_DIR)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2"),
        ("[1]", "line 2: Expected `object`"),
        ('{"prompt_token_ids": [1]}', "line 2: .*output_len"),
        ('{"prompt_token_ids": [], "output_len": 1}', "line 2: prompt_token_ids is empty"),
        ('{"prompt_token_ids": [1, -2], "output_len": 1}', "line 2: prompt_token_ids: -2 is not a token id"),
        ('{"prompt_token_ids": [1, 4294967296], "output_len": 1}', "line 2: prompt_token_ids: 4294967296"),
        ('{"prompt_token_ids": [1, "a"], "output_len": 1}', r"line 2: .*prompt_token_ids\[1\]"),
        ('{"prompt_token_ids": [1], "output_len": 0}', "line 2: output_len 0: must be at least 1"),
        ('{"prompt_token_ids": [1], "output_len": 1.5}', "line 2: .*output_len"),
        ('{"prompt_token_ids": [1], "output_len": 1, "temperature": 1}', "line 2: .*temperature"),
        ("\udcff".encode("utf-8", "surrogateescape"), "line 2"),
        ("[" * 100_000, "line 2"),
    ],
)
def test_a_broken_line_is_named(line: str | bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "list.jsonl"
    good = b'{"prompt_token_ids": [1], "output_len": 1}\n'
    path.write_bytes(good + (line.encode() if isinstance(line, str) else line) + b"\n")
    with pytest.raises(ConfigError, match=complaint):
        read_requests(path)


def test_a_file_without_a_request_or_none_at_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(ConfigError, match="has no requests"):
        read_requests(tmp_path / "empty")
    with pytest.raises(ConfigError, match="No such file"):
        read_requests(tmp_path / "none")

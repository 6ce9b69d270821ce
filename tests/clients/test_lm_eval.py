"""lm-evaluation-harness: the scores by way of the server are those of its own backend for transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import FOLDER, client_python, run_client
from tests.e2e.daemon import daemon
from tiercel.embedded import MODEL_DIR

KEY = "sk-test"
TASKS = Path(__file__).with_name("lm_eval_tasks")
MOST_APART = 1e-3  # of a log-probability: a sum over some tokens in float32

Json = dict[str, Any]  # Any: a JSON document


def evaluate(folder: Path, name: str, backend: str, arguments: str) -> tuple[Json, dict[str, list[Json]]]:
    """Run all tasks. Return the scores by task, and what was asked and answered, in order."""
    client_python("lm_eval")
    tasks = folder / "tasks"
    shutil.copytree(TASKS, tasks, dirs_exist_ok=True)
    run_client(
        [
            *(str(FOLDER / "lm_eval/bin/lm_eval"), "--model", backend, "--model_args", arguments),
            *(
                "--include_path",
                str(tasks),
                "--tasks",
                "local_choice,local_text",
                "--batch_size",
                "1",
                "--device",
                "cpu",
            ),
            *("--output_path", str(folder / name), "--log_samples"),
        ],
        patience_s=600.0,
        cwd=tasks,
        variables={"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")},
    )
    (results,) = (folder / name).rglob("results_*.json")
    samples: dict[str, list[Json]] = {}
    for path in results.parent.glob("samples_*.jsonl"):
        task = path.name.removeprefix("samples_").rpartition("_")[0]
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        samples[task] = sorted(lines, key=lambda one: one["doc_id"])
    return json.loads(results.read_text())["results"], samples


def test_local_completions_scores_like_the_backend_for_transformers(tmp_path: Path) -> None:
    with daemon(tmp_path, "--api-key", KEY) as served:
        base = f"model={served.model},base_url={served.url}/v1/completions,tokenizer={MODEL_DIR},num_concurrent=2"
        scores, samples = evaluate(tmp_path, "served", "local-completions", base)
        served.assert_nothing_held()
    expected_scores, expected = evaluate(tmp_path, "own", "hf", f"pretrained={MODEL_DIR},dtype=float32")

    assert samples.keys() == expected.keys() == {"local_choice", "local_text"}
    for one, other in zip(samples["local_choice"], expected["local_choice"], strict=True):
        for (found, is_greedy), (wanted, was_greedy) in zip(
            one["filtered_resps"], other["filtered_resps"], strict=True
        ):
            assert float(found) == pytest.approx(float(wanted), abs=MOST_APART)
            assert is_greedy == was_greedy
    answers = [one["filtered_resps"] for one in samples["local_text"]]
    assert answers == [one["filtered_resps"] for one in expected["local_text"]]
    assert any(answer[0].strip() for answer in answers)
    for task, name in (("local_choice", "acc,none"), ("local_text", "exact_match,none")):
        assert scores[task][name] == expected_scores[task][name]

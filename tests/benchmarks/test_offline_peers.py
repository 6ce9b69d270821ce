"""The offline peers with a list of requests: the real transformers, and a stand-in for vLLM that checks its calls."""

import importlib
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tiercel.loadtest.load.mix import DatasetSettings
from tiercel.loadtest.load.request_list import ListedRequest, digest, draw_requests, write_requests

PEERS = Path(__file__).resolve().parents[2] / "benchmarks" / "cpu"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}
Import = Callable[[str], ModuleType]


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Import]:
    """Yield a function that imports a script of benchmarks/cpu; the import is undone after the test."""
    monkeypatch.syspath_prepend(str(PEERS))
    yield importlib.import_module
    for name in ("offline_requests", "offline_transformers", "offline_vllm"):
        sys.modules.pop(name, None)


@pytest.fixture
def listed(tmp_path: Path) -> list[ListedRequest]:
    """Write five requests of different lengths to `list.jsonl`."""
    requests = draw_requests(DatasetSettings(input_len=10, output_len=6, range_ratio=0.5), 5, 0, 64, tmp_path)
    write_requests(tmp_path / "list.jsonl", requests)
    return requests


def test_a_peer_reads_our_list_and_knows_it_by_the_same_digest(
    peer: Import, listed: list[ListedRequest], tmp_path: Path
) -> None:
    shared = peer("offline_requests")
    found = shared.read_requests(tmp_path / "list.jsonl")
    assert [tuple(one) for one in found] == [(one.prompt_token_ids, one.output_len) for one in listed]
    outputs = [one.output_len for one in listed]
    result = shared.report("peer", "model", found, outputs, 2.0, 0.0, {}, ("pytest", "no-such-package"))
    assert result["requests_sha256"] == digest(listed)
    assert result["output_tokens_per_second"] == sum(outputs) / 2
    assert result["versions"].keys() == {"python", "pytest"}
    with pytest.raises(SystemExit, match=f"request 5: 0 output tokens instead of {outputs[4]}"):
        shared.report("peer", "model", found, [*outputs[:4], 0], 2.0, 0.0, {}, ())


def test_transformers_answers_our_list(
    peer: Import,
    listed: list[ListedRequest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ["--requests", str(tmp_path / "list.jsonl"), "--model", str(tmp_path), "--load-format", "dummy"]
    monkeypatch.setattr(sys, "argv", ["peer", *words, "--batch-size", "2", "--device", "cpu"])
    peer("offline_transformers").main()
    found = json.loads(capsys.readouterr().out)
    assert (found["engine"], found["kind"], found["schema_version"]) == ("transformers", "throughput", 1)
    assert found["requests_sha256"] == digest(listed)
    assert found["total_output_tokens"] == sum(one.output_len for one in listed)
    assert found["facts"]["batch_size"] == 2


class StandIn:
    """The part of vLLM's `LLM` that the script uses: it keeps its requests and answers with zeros."""

    asked: list[tuple[list[int], Any]] = []  # noqa: RUF012 - a test double

    def __init__(self, **flags: object) -> None:
        assert flags["skip_tokenizer_init"] and not flags["enable_prefix_caching"]
        config = SimpleNamespace(
            model_config=SimpleNamespace(dtype="torch.bfloat16", max_model_len=64),
            device_config=SimpleNamespace(device_type="cpu"),
            cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=8, enable_prefix_caching=False),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=4),
        )
        self.llm_engine = SimpleNamespace(vllm_config=config)

    def generate(self, prompts: list[dict[str, list[int]]], params: list[Any], use_tqdm: bool) -> list[Any]:
        StandIn.asked += [(prompt["prompt_token_ids"], how) for prompt, how in zip(prompts, params, strict=True)]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * how.max_tokens)]) for how in params]


class EngineFlags:
    """Two of vLLM's flags."""

    @staticmethod
    def add_cli_args(parser: ArgumentParser) -> None:
        parser.add_argument("--model")
        parser.add_argument("--load-format")

    @staticmethod
    def from_cli_args(args: Namespace) -> Namespace:
        return args


def test_vllm_gets_exact_lengths_and_no_tokenizer(
    peer: Import,
    listed: list[ListedRequest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    modules: dict[str, dict[str, object]] = {
        "vllm": {"LLM": StandIn, "EngineArgs": EngineFlags, "SamplingParams": SimpleNamespace},
        "vllm.inputs": {"TokensPrompt": dict},
        "vllm.utils": {},
        "vllm.utils.argparse_utils": {"FlexibleArgumentParser": ArgumentParser},
    }
    for name, names in modules.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(names)
    StandIn.asked.clear()
    words = ["--requests", str(tmp_path / "list.jsonl"), "--model", "m", "--output-json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["peer", *words, "--num-warmups", "2", "--num-runs", "2"])
    peer("offline_vllm").main()
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "out.json").read_text())
    assert (found["engine"], found["requests_sha256"]) == ("vllm", digest(listed))
    assert found["elapsed_time"] == min(found["facts"]["run_seconds"]) and len(found["facts"]["run_seconds"]) == 2
    warm, real, again = StandIn.asked[:2], StandIn.asked[2:7], StandIn.asked[7:]
    assert [ids for ids, _ in again] == [ids for ids, _ in real]
    assert [ids for ids, _ in real] == [one.prompt_token_ids for one in listed]
    assert [len(ids) for ids, _ in warm] == [len(ids) for ids, _ in real[:2]]
    assert warm[0][0] != real[0][0]
    assert [how.max_tokens for _, how in real] == [one.output_len for one in listed]
    assert all(how.ignore_eos and not how.detokenize for _, how in StandIn.asked)

"""`tiercel plan` from the command line: what it prints, what it reads, and what it refuses by name."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tiercel.cli.main import main
from tiercel.simulation.sizing import DEVICES

Captured = pytest.CaptureFixture[str]

SHAPE = ["--parameters", "34B", "--layers", "60", "--kv-heads", "8", "--head-dim", "128"]
YI_34B = [*SHAPE, "--heads", "56"]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
RATES: dict[str, object] = {
    "memory_bytes": "80GiB",
    "flops_per_s": 312e12,
    "memory_bytes_per_s": 2e12,
    "link_bytes_per_s": 20e9,
}
BUCKET: dict[str, object] = {"input_tokens": 1024, "output_tokens": 512, "share": 1}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def _last_of(words: Sequence[str]) -> list[str]:
    """Return the words without flags that a later word replaces, which the program refuses."""
    return [
        word
        for place, word in enumerate(words)
        if word not in words[place + 1 :] or not word.startswith("--")
        if not (place and words[place - 1].startswith("--") and words[place - 1] in words[place:])
    ]


def planned(*words: str, capsys: Captured) -> dict[str, dict[str, object]]:
    assert main(["plan", *_last_of(words), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def shown(*words: str, capsys: Captured) -> str:
    assert main(["plan", *_last_of(words)]) == 0
    return " ".join(capsys.readouterr().out.split())


def refused(*words: str, capsys: Captured) -> str:
    assert main(["plan", *_last_of(words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tiercel: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def written(name: str, value: object) -> str:
    Path(name).write_text(value if isinstance(value, str) else json.dumps(value))
    return name


def model_folder(**fields: object) -> str:
    Path("model").mkdir(exist_ok=True)
    written("model/config.json", LLAMA | fields)
    return "model"


def test_help_fits_one_screen(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    assert "Usage: tiercel plan" in out
    assert len(out.splitlines()) < 40


def test_the_worked_example_of_the_long_context_analysis(capsys: Captured) -> None:
    short = planned("--device", "A100-80G", "--ctx", "4k", *YI_34B, capsys=capsys)["context"]
    long = planned("--device", "A100-80G", "--ctx", "50k", *YI_34B, capsys=capsys)["context"]
    assert short["prefill_s"] == pytest.approx(0.89, rel=0.03)
    assert short["decode_s"] == pytest.approx(8.5, rel=0.02)
    assert long["decode_s"] == pytest.approx(9.8, rel=0.03)
    assert short["concurrency"] in range(17, 21)
    assert long["concurrency"] == 1
    assert long["switch_s"] == pytest.approx(1.1, rel=0.12)


@pytest.mark.parametrize(
    ("width", "seconds", "paper"), [((), 17.79, 1.262), (("--attention-width", "4096"), 14.84, 1.052)]
)
def test_the_papers_long_prefill_needs_a_narrower_attention_than_the_models(
    width: tuple[str, ...], seconds: float, paper: float, capsys: Captured
) -> None:
    words = ("--device", "A100-80G", "--ctx", "50k", *YI_34B, *width)
    document = planned(*words, capsys=capsys)
    assert document["context"]["prefill_s"] == pytest.approx(seconds, abs=0.005)
    assert document["context"]["prefill_s"] / 14.1 == pytest.approx(paper, abs=0.001)  # type: ignore[operator]
    assert document["model"]["is_attention_width_given"] is bool(width)
    out = shown(*words, capsys=capsys)
    if width:
        assert "attention width 4,096, from --attention-width instead of heads * head size" in out
        assert "prefill 14.8 s" in out
    else:
        assert "attention width 7,168, heads * head size" in out
        assert "prefill 17.8 s" in out


def test_the_five_figures_are_printed_for_people(capsys: Captured) -> None:
    words = ("--device", "a100-80g", "--ctx", "50k", "--turns", "5", "--users", "20", *YI_34B)
    out = shown(*words, capsys=capsys)
    for figure in (
        "weights 63.3 GiB, 34 B parameters",
        "KV per token 240.0 KiB",
        "compute-bound above 156 tokens per step",
        "Context of 50,000 tokens",
        "concurrency 1 contexts; the longest has 72,832 tokens",
        "prefill 17.8 s",
        "decode 10 s for 250 tokens",
        "context switch 1.23 s out and in",
        "session throughput at most 48.6 per hour, limited by memory",
        "session 6.2 min: 5 turns, 60 s of thinking each",
    ):
        assert figure in out
    assert "Workload" not in out


def test_a_context_that_does_not_fit_is_an_answer(capsys: Captured) -> None:
    words = ("--device", "A100-80G", "--ctx", "100k", *YI_34B)
    assert "at most 0 per hour, the context does not fit" in shown(*words, capsys=capsys)
    assert planned(*words, capsys=capsys)["context"]["bound_by"] == "memory"


def test_a_reserve_takes_from_the_contexts(capsys: Captured) -> None:
    words = ("--device", "A100-80G", "--ctx", "4096", *YI_34B)
    figures = planned(*words, "--reserve", "6G", capsys=capsys)
    assert figures["context"]["concurrency"] == 11
    assert figures["reserve_bytes"] == 6 * 1024**3


def test_a_model_folder_gives_the_shape_that_serve_would_load(capsys: Captured) -> None:
    folder = model_folder()
    shape = planned("--device", "cpu", "--ctx", "256", "--model", folder, capsys=capsys)["model"]
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    assert shape["parameters"] == shape["active_parameters"] == 64 * 32 + 3 * layer + 32
    assert shape["kv_token_bytes"] == 384  # 3 layers, 2 heads of 8, keys and values, 4 bytes each
    assert shape["attention_width"] == 32
    assert shape["itemsize"] == 4
    words = ("--device", "cpu", "--ctx", "256", "--model", folder, "--dtype", "bfloat16", "--attention-width", "16")
    halved = planned(*words, capsys=capsys)["model"]
    assert (halved["kv_token_bytes"], halved["attention_width"]) == (192, 16)


def test_kv_in_8_bits_has_a_byte_for_each_number_and_two_scales_a_head(capsys: Captured) -> None:
    words = ("--device", "cpu", "--ctx", "256", "--model", model_folder(), "--kv-cache-dtype", "int8")
    shape = planned(*words, capsys=capsys)["model"]
    assert shape["kv_token_bytes"] == 3 * 2 * (2 * 8 + 4)
    assert (shape["itemsize"], shape["weights_bytes"]) == (4, 4 * shape["parameters"])  # type: ignore[operator]

    words = ("--device", "A100-80G", "--ctx", "50k", *YI_34B)
    wide, narrow = (
        planned(*words, "--kv-cache-dtype", kind, capsys=capsys)["model"]["kv_token_bytes"] for kind in ("auto", "fp8")
    )
    assert (wide, narrow) == (60 * 8 * 512, 60 * 8 * 260)


def test_a_model_of_transformers_has_a_shape_too(capsys: Captured) -> None:
    Path("gpt2").mkdir()
    fields = {
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    written("gpt2/config.json", {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **fields})
    shape = planned("--device", "cpu", "--ctx", "128", "--model", "gpt2", capsys=capsys)["model"]
    assert (shape["kv_token_bytes"], shape["attention_width"]) == (512, 32)
    assert "128 tokens" in refused("--device", "cpu", "--ctx", "129", "--model", "gpt2", capsys=capsys)


def test_query_heads_give_the_width_of_attention(capsys: Captured) -> None:
    shape = planned("--device", "H200", "--ctx", "4k", *SHAPE, "--heads", "56", capsys=capsys)["model"]
    assert shape["attention_width"] == 7168


def test_explicit_shapes_need_no_torch() -> None:
    line = ["plan", "--device", "H200", "--ctx", "4k", *YI_34B, "--json"]
    code = f"import sys, tiercel.cli.main; tiercel.cli.main.main({line!r}); print(*sys.modules, file=sys.stderr)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {name.split(".")[0] for name in ran.stderr.split()} & {"torch", "transformers", "numpy"}


# Devices


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_name_is_not_case_sensitive(name: str, capsys: Captured) -> None:
    small = ("--ctx", "4096", *SHAPE, "--heads", "56", "--parameters", "1B")
    assert planned("--device", name.upper(), *small, capsys=capsys)["device"]["name"] == name


def test_a_file_of_measured_rates_is_a_device(capsys: Captured) -> None:
    built_in = planned("--device", "A100-80G", "--ctx", "4k", *YI_34B, capsys=capsys)
    from_json = planned("--device", written("mine.json", RATES), "--ctx", "4k", *YI_34B, capsys=capsys)
    toml = "\n".join(f"{name} = {value!r}" for name, value in (RATES | {"name": "my card"}).items())
    from_toml = planned("--device", written("mine.toml", toml), "--ctx", "4k", *YI_34B, capsys=capsys)
    assert from_json["context"] == from_toml["context"] == built_in["context"]
    assert from_json["device"]["name"] == "mine"
    assert from_toml["device"]["name"] == "my card"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"flops_per_s": 0}, "mine.json: flops_per_s 0: expected a number from 1 to 1e+21"),
        ({"flops_per_s": "fast"}, "mine.json: flops_per_s fast: expected a number"),
        ({"link_bytes_per_s": True}, "mine.json: link_bytes_per_s True: expected a number"),
        ({"memory_bytes_per_s": float("nan")}, "mine.json: memory_bytes_per_s nan: expected a number from 1"),
        ({"memory_bytes_per_s": float("inf")}, "mine.json: memory_bytes_per_s inf: expected a number from 1"),
        ({"memory_bytes_per_s": 10**400}, "mine.json: memory_bytes_per_s "),
        ({"float32_flops_per_s": -1}, "mine.json: float32_flops_per_s -1: expected a number from 1"),
        ({"memory_bytes": "lots"}, "mine.json: memory_bytes lots: expected bytes, such as"),
        ({"memory_bytes": 1.5}, "mine.json: memory_bytes 1.5: expected a whole number"),
        ({"memory_bytes": 0}, "mine.json: memory_bytes 0: expected a whole number from 1"),
        ({"memory_bytes": "1GiB"}, "leave no memory for KV in the 1.0 GiB of mine"),
        ({"name": ""}, "mine.json: name '': expected 1 to 80 printable characters"),
        ({"name": "a\nb"}, "mine.json: name 'a\\nb': expected"),
        ({"link_byte_per_s": 1}, "mine.json: there is no field 'link_byte_per_s'; did you mean link_bytes_per_s?"),
        ({"colour": 1}, "mine.json: there is no field 'colour'; expected flops_per_s"),
    ],
)
def test_a_wrong_device_file_is_refused_by_its_field(fields: dict[str, object], words: str, capsys: Captured) -> None:
    file = written("mine.json", RATES | fields)
    assert words in refused("--device", file, "--ctx", "4k", *YI_34B, capsys=capsys)


@pytest.mark.parametrize("field", RATES)
def test_a_rate_that_is_missing_is_named(field: str, capsys: Captured) -> None:
    file = written("mine.json", {name: value for name, value in RATES.items() if name != field})
    assert f"mine.json: {field} is missing" in refused("--device", file, "--ctx", "4k", *YI_34B, capsys=capsys)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("mine.json", "{", "mine.json: not valid JSON"),
        ("mine.json", "[]", "mine.json: not a JSON object"),
        ("mine.toml", "flops_per_s = ", "mine.toml: not valid TOML"),
        ("mine.toml", f"flops_per_s = {'9' * 5000}", "mine.toml: not valid TOML"),
        ("mine.yaml", "", "--device mine.yaml: expected one of H200, A100-80G, cpu, or a .json or .toml file"),
    ],
)
def test_a_device_file_that_cannot_be_read_is_refused(name: str, content: str, words: str, capsys: Captured) -> None:
    assert words in refused("--device", written(name, content), "--ctx", "4k", *YI_34B, capsys=capsys)


# Workloads


def test_the_admissible_rate_is_one_over_the_sum_of_the_loads(capsys: Captured) -> None:
    slow = {"input_tokens": 8000, "output_tokens": 200, "share": 0.4, "requests_per_s": 2.0}
    fast = {"input_tokens": 100, "output_tokens": 100, "share": 0.6, "requests_per_s": 20.0}
    file = written("hist.json", {"buckets": [slow, fast]})
    words = ("--device", "A100-80G", "--workload", file, *YI_34B)
    document = planned(*words, capsys=capsys)
    assert document["workload"]["admissible_requests_per_s"] == pytest.approx(1 / (0.4 / 2 + 0.6 / 20))
    assert "context" not in document
    out = shown(*words, capsys=capsys)
    assert "admissible rate 4.35 requests per second" in out
    assert "8,000 200 40.0% 2 measured 87.0%" in out


def test_a_bucket_without_a_measured_rate_is_sized_by_formula(capsys: Captured) -> None:
    words = ("--device", "A100-80G", "--workload", written("hist.json", {"buckets": [BUCKET]}), *YI_34B)
    (bucket,) = planned(*words, capsys=capsys)["workload"]["buckets"]  # type: ignore[misc]
    assert bucket["is_measured"] is False
    assert bucket["load"] == pytest.approx(1 / bucket["requests_per_s"])
    one = planned(*words, "--max-num-seqs", "1", capsys=capsys)["workload"]
    assert one["admissible_requests_per_s"] < bucket["requests_per_s"] / 3  # type: ignore[operator]


def test_a_workload_may_be_toml_and_stand_beside_a_context(capsys: Captured) -> None:
    file = written("hist.toml", "[[buckets]]\ninput_tokens = 1024\noutput_tokens = 512\nshare = 1.0\n")
    words = ("--device", "A100-80G", "--ctx", "4k", "--workload", file, *YI_34B)
    assert {"context", "workload"} <= set(planned(*words, capsys=capsys))


@pytest.mark.parametrize(
    ("buckets", "words"),
    [
        ([], "hist.json: buckets: expected a list of 1 to 10,000 buckets"),
        ("many", "hist.json: buckets: expected a list"),
        ([1], "hist.json: buckets[0]: expected an object"),
        ([BUCKET | {"share": 0.5}], "the shares of buckets sum to 0.5: expected 1"),
        ([BUCKET | {"share": 0}], "hist.json: buckets[0].share 0: expected a number above 0 to 1"),
        ([BUCKET, BUCKET | {"share": -1}], "hist.json: buckets[1].share -1: expected"),
        ([BUCKET | {"input_tokens": 0}], "buckets[0].input_tokens 0: expected a whole number from 1"),
        ([BUCKET | {"output_tokens": 1.5}], "buckets[0].output_tokens 1.5: expected a whole number from 1"),
        ([BUCKET | {"requests_per_s": 0}], "buckets[0].requests_per_s 0: expected a number above 0"),
        ([BUCKET | {"inputs": 3}], "buckets[0]: there is no field 'inputs'; did you mean input_tokens?"),
        ([{"share": 1}], "buckets[0]: input_tokens is missing"),
        ([BUCKET | {"input_tokens": 80_000}], "buckets[0]: 80,512 tokens: A100-80G has memory for 72,832"),
    ],
)
def test_a_wrong_workload_is_refused_by_its_bucket(buckets: object, words: str, capsys: Captured) -> None:
    file = written("hist.json", {"buckets": buckets})
    assert words in refused("--device", "A100-80G", "--workload", file, *YI_34B, capsys=capsys)


def test_a_bucket_beyond_the_models_context_is_refused(capsys: Captured) -> None:
    file = written("hist.json", {"buckets": [BUCKET]})
    words = ("--device", "cpu", "--workload", file, "--model", model_folder())
    assert "buckets[0]: 1,536 tokens: the model's context is 256" in refused(*words, capsys=capsys)


@pytest.mark.parametrize("name", ["nowhere.json", "hist.csv"])
def test_an_invalid_workload_file_is_refused(name: str, capsys: Captured) -> None:
    written("hist.csv", "1,2,3")
    assert f"--workload {name}: " in refused("--device", "H200", "--workload", name, *YI_34B, capsys=capsys)


# Flags


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--ctx 0", "--ctx 0: expected tokens such as 4096, 8k or 8K, from 1 to 1,000,000,000"),
        ("--ctx 2000M", "--ctx 2000M: expected tokens such as 4096, 8k or 8K, from 1"),
        ("--ctx long", "--ctx long: expected tokens such as 4096, 8k or 8K"),
        ("--ctx 4k --turns 0", "--turns 0: expected a whole number, from 1 to 1,000,000"),
        ("--ctx 4k --turns x", "--turns"),
        ("--ctx 4k --users 0", "--users 0: expected a whole number, from 1"),
        ("--ctx 4k --answer-tokens -1", "--answer-tokens -1: expected tokens"),
        ("--ctx 4k --think nan", "--think nan: expected a number, from 0 to 1,000,000"),
        ("--ctx 4k --think -1", "--think -1: expected a number, from 0"),
        ("--ctx 4k --max-num-seqs 0", "--max-num-seqs 0: expected a whole number, from 1"),
        ("--ctx 4k --reserve half", "--reserve half: expected a size"),
        ("--ctx 4k --reserve 75G", "--reserve 75.0 GiB leave no memory for KV in the 80.0 GiB of A100-80G"),
        ("--ctx 4k --dtype int4", "--dtype"),
        ("--ctx 4k --active-parameters 35B", "--active-parameters 35,000,000,000: expected at most the model's 34,"),
        ("--ctx 4k --heads 12", "--heads 12: expected a multiple of --kv-heads 8"),
        ("--ctx 4k --attention-width 0", "--attention-width 0: expected a whole number, from 1 to 10,000,000"),
        ("--ctx 4k --device B200", "--device B200: expected one of H200, A100-80G, cpu"),
        ("--ctx 4k --device no.json", "--device no.json: there is no such file"),
        ("", "nothing to plan: give --ctx, --workload or both"),
        ("--ctx 4k --model m", "--parameters and --model: give one of them"),
    ],
)
def test_a_wrong_flag_is_refused_with_its_limits(line: str, words: str, capsys: Captured) -> None:
    assert words in refused("--device", "A100-80G", *YI_34B, *line.split(), capsys=capsys)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--parameters many", "--parameters many: expected parameters such as 34B"),
        ("--parameters 0", "--parameters 0: expected parameters such as 34B, 500M or 8.03e9, from 1 to"),
        ("--parameters 1e99", "--parameters 1e99: expected parameters such as 34B, 500M or 8.03e9, from 1 to"),
        ("--layers 0", "--layers 0: expected a whole number, from 1 to 10,000"),
        ("--kv-heads 0", "--kv-heads 0: expected a whole number, from 1 to 10,000"),
        ("--head-dim 65537", "--head-dim 65537: expected a whole number, from 1 to 65,536"),
    ],
)
def test_a_wrong_shape_is_refused_with_its_limits(flags: str, words: str, capsys: Captured) -> None:
    assert words in refused("--device", "H200", "--ctx", "4k", *YI_34B, *flags.split(), capsys=capsys)


def test_an_incomplete_shape_is_refused_with_its_missing_fields(capsys: Captured) -> None:
    half = refused("--device", "H200", "--ctx", "4k", "--layers", "60", "--kv-heads", "8", capsys=capsys)
    assert "without --model, also give --parameters, --head-dim, --heads" in half
    assert "no model: give --model" in refused("--device", "H200", "--ctx", "4k", capsys=capsys)
    assert "--device" in refused("--ctx", "4k", *YI_34B, capsys=capsys)


def test_an_invalid_model_folder_or_a_too_short_context_is_refused(capsys: Captured) -> None:
    words = ("--device", "H200", "--ctx", "4k", "--model")
    assert "nowhere: no such folder" in refused(*words, "nowhere", capsys=capsys)
    assert "--ctx 4,000: the model's context is 256 tokens" in refused(*words, model_folder(), capsys=capsys)
    wrong = model_folder(num_hidden_layers="three")
    assert "num_hidden_layers" in refused(*words, wrong, capsys=capsys)


def test_the_active_parameters_of_a_native_mixture_are_counted(capsys: Captured) -> None:
    fields = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    words = ("--device", "cpu", "--ctx", "256", "--model", model_folder(**fields))
    model = planned(*words, capsys=capsys)["model"]
    one_expert = 3 * int(LLAMA["hidden_size"]) * int(LLAMA["intermediate_size"])  # type: ignore[call-overload]
    assert model["parameters"] - model["active_parameters"] == 6 * one_expert * LLAMA["num_hidden_layers"]
    assert planned(*words, "--active-parameters", "5k", capsys=capsys)["model"]["active_parameters"] == 5000


def test_another_mixture_of_experts_must_state_its_active_parameters(capsys: Captured) -> None:
    words = ("--device", "cpu", "--ctx", "256", "--model", model_folder(num_experts=8))
    assert "a mixture of experts: give --active-parameters" in refused(*words, capsys=capsys)
    assert planned(*words, "--active-parameters", "5k", capsys=capsys)["model"]["active_parameters"] == 5000

"""The command `tiercel check`."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.conformance.models import make_checkpoint
from tests.conformance.quantized import compress, compressed_config, write_quantized
from tests.modelfile.written import write_model
from tiercel.cli.main import main
from tiercel.device.cpu import CpuDevice

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny random models with a tokenizer: `llama` and `gpt2`."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    llama = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=1,
        dtype="float32",
    )
    LlamaForCausalLM(llama).save_pretrained(root / "llama")
    gpt2 = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=1)
    GPT2LMHeadModel(gpt2).save_pretrained(root / "gpt2")
    vocabulary = {text: index for index, text in enumerate(("<s>", "</s>", *sorted("abcdefghij")))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    for folder in root.iterdir():
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return root


@pytest.fixture(autouse=True)
def measured_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates of the machine are measured with one repetition."""
    monkeypatch.setattr("tiercel.engine.measure.machine_rates._READ_BYTES", 1 << 20)
    monkeypatch.setattr("tiercel.engine.measure.machine_rates.measure_machine.__defaults__", (0.001,))


@pytest.fixture
def llama(folders: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama to spoil."""
    return Path(shutil.copytree(folders / "llama", tmp_path / "llama"))


def checked(folder: Path, *flags: str, capsys: Captured) -> str:
    assert main(["check", str(folder), "--device", "cpu", *flags]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return " ".join(captured.out.split())


def refused(folder: Path, *flags: str, capsys: Captured) -> str:
    assert main(["check", str(folder), "--device", "cpu", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_good_folder_is_described_with_its_arithmetic(folders: Path, capsys: Captured) -> None:
    out = checked(folders / "llama", "--kv-cache-memory-bytes", "1M", capsys=capsys)
    for words in (
        "architecture LlamaForCausalLM",
        "implementation native",
        "type float32",
        "context 256 tokens, 256 served",
        "tokens 12 of the model's 64",
        "special tokens <s> </s>",
        "end of sequence </s>",
        "chat template yes",
        "per token 384 B",  # 3 layers, 2 heads of 8, keys and values, 4 bytes each
        "1020.0 KiB = 169 blocks of 16 tokens",  # one block of 6,144 bytes is the null block
        "room for 2,704 tokens, 10.6 sequences",
    ):
        assert words in out


def test_the_speed_of_decoding_is_predicted_with_what_it_is_bound_by(folders: Path, capsys: Captured) -> None:
    out = checked(folders / "llama", "--max-num-seqs", "32", capsys=capsys)
    for words in ("1 stream about", "16 streams about", "32 streams about", "a prediction from these rates alone"):
        assert words in out
    assert "tokens/s, bound by reading memory" in out or "tokens/s, bound by multiplying" in out
    assert "computed for 256 tokens of context" in out
    assert f"GFLOP/s with {CpuDevice().threads} thread" in out
    assert "GFLOP/s with 1 thread;" in checked(folders / "llama", "--threads", "1", capsys=capsys)


def test_a_16_bit_dtype_halves_weights_and_kv(folders: Path, capsys: Captured) -> None:
    assert "per token 192 B" in checked(folders / "llama", "--dtype", "bfloat16", capsys=capsys)


def test_kv_in_8_bits_is_counted_with_its_scales(folders: Path, capsys: Captured) -> None:
    for name, implementation, cache in (("llama", 120, "int8"), ("gpt2", 2 * 4 * (2 * 8 + 4), "fp8")):
        out = checked(folders / name, "--kv-cache-dtype", cache, capsys=capsys)
        assert f"per token {implementation} B" in out
        assert f"KV {'int8' if cache == 'int8' else 'float8_e4m3fn'}" in out


def test_quantised_weights_are_described_with_their_bytes(folders: Path, tmp_path: Path, capsys: Captured) -> None:
    args = QuantizationArgs.model_validate({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32})
    write_quantized(tmp_path / "packed", compress(args, "pack-quantized"), compressed_config(args, "pack-quantized"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folders / "llama" / name, tmp_path / "packed" / name)
    sizes = dict[str, float]()
    for flags in ((), ("--load-format", "dummy")):
        out = checked(tmp_path / "packed", *flags, capsys=capsys)
        assert "quantization compressed-tensors: int4, groups of 32" in out
        assert "1 stream about" in out
    for name in ("none", "int8", "int4"):
        flags = () if name == "none" else ("--quantization", name)
        out = checked(folders / "llama", "--dtype", "bfloat16", *flags, capsys=capsys)
        assert ("quantization none" if name == "none" else f"{name}, ") in out
        sizes[name] = float(re.findall(r"([\d.]+) bytes per weight", out)[0])
    assert 2.05 > sizes["none"] >= 2 > sizes["int8"] > sizes["int4"] > 0.5


def test_an_architecture_of_transformers_is_described_too(folders: Path, capsys: Captured) -> None:
    out = checked(folders / "gpt2", capsys=capsys)
    assert "implementation transformers" in out
    assert "context 128 tokens" in out
    assert "per token 512 B" in out


def test_dummy_weights_need_no_checkpoint(llama: Path, capsys: Captured) -> None:
    (llama / "model.safetensors").unlink()
    assert "LlamaForCausalLM" in checked(llama, "--load-format", "dummy", capsys=capsys)


def test_a_folder_without_weights_is_refused(llama: Path, capsys: Captured) -> None:
    (llama / "model.safetensors").unlink()
    assert "model.safetensors" in refused(llama, capsys=capsys)


def test_a_tensor_that_is_missing_or_misshapen_is_named(llama: Path, capsys: Captured) -> None:
    weights = load_file(llama / "model.safetensors")
    spoilt = dict(weights)
    del spoilt["model.norm.weight"]
    save_file(spoilt, llama / "model.safetensors")
    assert "model.norm.weight" in refused(llama, capsys=capsys)
    spoilt = dict(weights) | {"model.norm.weight": torch.ones(8)}
    save_file(spoilt, llama / "model.safetensors")
    assert "model.norm.weight" in refused(llama, capsys=capsys)


def test_a_truncated_file_is_refused(llama: Path, capsys: Captured) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors" in refused(llama, capsys=capsys)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization_config: quant_method: aqlm"),
        ({"quantization_config": {"quant_method": "awq", "group_size": 16}}, "qweight is missing"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers"),
        ({"architectures": ["MambaForCausalLM"], "model_type": "nonsense"}, "nonsense"),
    ],
)
def test_a_config_that_cannot_be_served_is_one_line(
    llama: Path, fields: dict[str, object], words: str, capsys: Captured
) -> None:
    file = llama / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    assert words in refused(llama, capsys=capsys)


def test_a_tokenizer_that_is_missing_is_refused(llama: Path, capsys: Captured) -> None:
    (llama / "tokenizer.json").unlink()
    assert "tokenizer.json" in refused(llama, capsys=capsys)


def test_a_tokenizer_with_more_tokens_than_the_model_is_reported(llama: Path, capsys: Captured) -> None:
    tokenizer = json.loads((llama / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["k"] = 64
    (llama / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(["check", str(llama), "--device", "cpu"]) == 0
    assert "warning: the tokenizer has 65 tokens, the model 64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--max-model-len", "512"), "--max-model-len 512"),
        (("--max-model-len", "256", "--kv-cache-memory-bytes", "65536"), "--max-model-len 256"),
        (("--kv-cache-memory-bytes", "1048576G"), "kv-cache-memory-bytes"),
        (("--override-generation-config", '{"top_p": -1}'), "top_p"),
        (("--model-impl", "native", "--attention-backend", "flash"), "--attention-backend flash: expected one of"),
    ],
)
def test_flags_that_do_not_fit_the_model_are_refused(
    folders: Path, flags: tuple[str, ...], words: str, capsys: Captured
) -> None:
    assert words in refused(folders / "llama", *flags, capsys=capsys)


def test_a_gguf_file_is_checked_as_a_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "a.gguf"
    write_model(path, "qwen2", "Q4_K", others={"embed_tokens": "Q6_K"})
    out = checked(path, capsys=capsys)
    for words in (
        f"file {path}",
        f"served as {path}, a.gguf",
        "architecture Qwen2ForCausalLM",
        "quantization gguf: Q6_K; Q4_K",
        "special tokens <unk> <s> </s>",
        "end of sequence </s>",
        "chat template yes",
    ):
        assert words in out
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path}: not a whole GGUF file: tensor" in refused(path, capsys=capsys)


def test_experts_on_the_ssd_do_not_count_as_memory(folders: Path, tmp_path: Path, capsys: Captured) -> None:
    make_checkpoint("mixtral", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folders / "llama" / name, tmp_path / name)
    assert "in memory" not in checked(tmp_path, capsys=capsys)
    out = checked(tmp_path, "--expert-memory", "100K", capsys=capsys)
    assert "other experts are fetched when they are needed" in out
    told = refused(folders / "llama", "--expert-memory", "1M", capsys=capsys)
    assert "--expert-memory: LlamaForCausalLM has no mixture" in told


def test_formats_of_calls_and_thoughts_are_named_and_an_unknown_one_is_reported(llama: Path, capsys: Captured) -> None:
    assert "tool calls hermes, described in the prompt" in checked(llama, capsys=capsys)
    loop = "{{ tools }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    end = "{{ c.function | tojson }}{% endfor %}</s>{% endfor %}"
    known, unknown = (f"{loop}{mark}{end}" for mark in ("<tool_call>", "<|tool_call|>"))
    assert "tool calls hermes thoughts none" in checked(llama, "--chat-template", known, capsys=capsys)
    assert main(["check", str(llama), "--device", "cpu", "--chat-template", unknown]) == 0
    captured = capsys.readouterr()
    assert "tool calls none" in " ".join(captured.out.split())
    assert "warning: the chat template writes tool calls in a format that is not known" in captured.err

"""Loading: targets of tensors, memory, and errors that name file and tensor."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conformance.models import make_checkpoint
from tests.engine.models.paged_run import PagedRun
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.models.base import Model
from tiercel.engine.models.config import parse_decoder, read_config
from tiercel.engine.models.decoder import Decoder
from tiercel.engine.models.precision import Precision
from tiercel.engine.models.registry import load_model
from tiercel.engine.models.torch_ops import TorchOps
from tiercel.engine.models.weights import fill_dummy
from tiercel.settings.settings import EngineSettings, LoadFormat
from tiercel.values.errors import ConfigError

CPU = torch.device("cpu")
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint("llama3", tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make_checkpoint("llama3", tmp_path, max_shard_size="150KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    return tmp_path


def load(folder: Path, load_format: LoadFormat = "auto", seed: int = 0, dtype: str = "float32") -> Model:
    settings = EngineSettings(model=str(folder), dtype=dtype, load_format=load_format, seed=seed)
    return load_model(settings, CPU, SdpaAttention())


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder)
    return str(caught.value)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def some_logits(model: Model) -> Tensor:
    return PagedRun(model, 1, 32).prefill(torch.arange(3, 23), 20)


def test_shards_are_loaded_like_one_file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("sharded")
    make_checkpoint("llama3", other, max_shard_size="150KB")

    one, two = load(folder), load(other)

    assert torch.equal(some_logits(one), some_logits(two))
    assert one.fingerprint == two.fingerprint


def test_progress_counts_up_to_every_byte(folder: Path) -> None:
    reported: list[tuple[int, int]] = []

    model = load_model(
        EngineSettings(model=str(folder)), CPU, SdpaAttention(), lambda done, total: reported.append((done, total))
    )

    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    assert reported[-1] == (model.weights_bytes, model.weights_bytes)


def test_loading_twice_gives_the_same_fingerprint(folder: Path) -> None:
    fingerprint = load(folder).fingerprint

    assert len(fingerprint) == 32
    assert load(folder).fingerprint == fingerprint


def test_one_changed_weight_changes_the_fingerprint(folder: Path) -> None:
    before = load(folder).fingerprint

    rewrite(folder, lambda tensors: tensors[NAME][7, 9:10].add_(1e-3))

    assert load(folder).fingerprint != before


def test_two_exchanged_weights_change_the_fingerprint(folder: Path) -> None:
    before = load(folder).fingerprint

    rewrite(folder, lambda tensors: tensors[NAME].copy_(tensors[NAME].flip(0)))

    assert load(folder).fingerprint != before


def test_config_and_dtype_change_the_fingerprint(folder: Path) -> None:
    before = load(folder).fingerprint
    assert load(folder, dtype="bfloat16").fingerprint != before

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))

    assert load(folder).fingerprint != before


def test_dummy_weights_need_no_file_and_follow_the_seed(folder: Path) -> None:
    (folder / "model.safetensors").unlink()

    one, again, other = load(folder, "dummy", 1), load(folder, "dummy", 1), load(folder, "dummy", 2)

    assert torch.equal(some_logits(one), some_logits(again))
    assert not torch.equal(some_logits(one), some_logits(other))
    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert some_logits(one).std() > 0


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()

    assert "model.safetensors" in refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.gguf"])
def test_other_formats_are_refused_by_the_name_of_the_file(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)

    assert name in refusal(folder)


def test_a_missing_tensor_is_refused_by_name(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(NAME))

    assert f"model.safetensors: tensor {NAME} is missing" in refusal(folder)


def test_a_tensor_that_the_architecture_lacks_is_refused_by_name(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.1.self_attn.q_proj.bias": torch.zeros(64)}))

    assert "tensor model.layers.1.self_attn.q_proj.bias" in refusal(folder)


def test_a_tensor_of_another_shape_is_refused_by_name(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({NAME: torch.zeros(64, 128)}))

    message = refusal(folder)
    assert f"model.safetensors: tensor {NAME}" in message
    assert "[64, 128], not [128, 64]" in message


def test_a_tensor_of_integers_is_refused_by_name(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({NAME: torch.zeros(128, 64, dtype=torch.int8)}))

    assert f"tensor {NAME}: dtype torch.int8" in refusal(folder)


def test_stored_rotations_of_old_checkpoints_are_ignored(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))

    load(folder)


@pytest.mark.parametrize("keep", [0, 4, 8, 200, 100_000])
def test_a_truncated_file_is_refused_by_name(folder: Path, keep: int) -> None:
    os.truncate(folder / "model.safetensors", keep)

    assert "model.safetensors: not a whole file of weights" in refusal(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 99999999]}}',
        b'{"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 16]}}',
    ],
)
def test_a_hostile_header_is_refused_by_file(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))

    assert "model.safetensors" in refusal(folder)


def test_a_header_longer_than_the_file_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")

    assert "model.safetensors" in refusal(folder)


def test_a_missing_shard_is_refused_by_name(sharded: Path) -> None:
    missing = min(sharded.glob("model-*.safetensors"))
    missing.unlink()

    assert f"{missing.name}: the index names this file, but it is missing" in refusal(sharded)


def test_a_shard_that_the_index_does_not_name_is_refused(sharded: Path) -> None:
    save_file({"x": torch.zeros(1)}, sharded / "model-00099-of-00099.safetensors")

    assert "model-00099-of-00099.safetensors" in refusal(sharded)


def test_a_tensor_in_another_shard_than_the_index_says_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    name = next(iter(index["weight_map"]))
    other = next(file for file in index["weight_map"].values() if file != index["weight_map"][name])
    index["weight_map"][name] = other
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))

    assert f"tensor {name}" in refusal(sharded)


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", 3, "x.bin", 300 * "x" + ".safetensors"]
)
def test_an_index_that_points_out_of_the_folder_is_refused(sharded: Path, file: object) -> None:
    index = {"weight_map": {NAME: file}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))

    assert NAME in refusal(sharded)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_unreadable_index_is_refused(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)

    assert "model.safetensors.index.json" in refusal(sharded)


_MEASURE = """
import sys, threading, time, torch
torch.set_num_threads(1)
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.models.config import parse_decoder, read_config
from tiercel.engine.models.decoder import Decoder
from tiercel.engine.models.precision import Precision
from tiercel.engine.models.registry import load_model
from tiercel.engine.models.weights import fill_dummy
from tiercel.settings.settings import EngineSettings

def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def load(folder):
    settings = EngineSettings(model=folder, dtype=sys.argv[4], model_impl=sys.argv[3])
    return load_model(settings, torch.device("cpu"), SdpaAttention())

load(sys.argv[2])  # so that imports, thread pools and caches do not count as weights
before = peak = anonymous_bytes()
done = threading.Event()

def watch():
    global peak
    while not done.wait(0.0005):
        peak = max(peak, anonymous_bytes())

watcher = threading.Thread(target=watch)
watcher.start()
model = load(sys.argv[1])
done.set()
watcher.join()
print(max(peak, anonymous_bytes()) - before, model.weights_bytes)
"""


@pytest.mark.parametrize(
    ("impl", "dtype"),
    [
        ("native", "bfloat16"),
        pytest.param("native", "float32", marks=pytest.mark.slow),
        pytest.param("transformers", "float32", marks=pytest.mark.slow),
    ],
)
def test_loading_takes_the_memory_of_the_weights_and_little_more(tmp_path: Path, impl: str, dtype: str) -> None:
    """TIERCEL_TEST_MODEL=<folder of a 0.5 B model> measures that model instead of the 100 MB of this test."""
    make_checkpoint("llama3", tmp_path / "tiny")
    folder = os.environ.get("TIERCEL_TEST_MODEL") or str(_make_hundred_megabytes(tmp_path / "big"))

    run = subprocess.run(
        [sys.executable, "-c", _MEASURE, folder, str(tmp_path / "tiny"), impl, dtype],
        capture_output=True,
        text=True,
        check=True,
    )

    taken, weights = map(int, run.stdout.split())
    print(f"anonymous memory / weights = {taken / weights:.3f}")
    assert weights > 40_000_000
    assert 0.9 < taken / weights < 1.2


def _make_hundred_megabytes(folder: Path) -> Path:
    make_checkpoint("llama3", folder)
    config = json.loads((folder / "config.json").read_text())
    sizes = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "intermediate_size": 2048}
    config |= sizes | {"num_hidden_layers": 6, "vocab_size": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    model = Decoder(parse_decoder(read_config(folder)), TorchOps(SdpaAttention()), Precision.of(torch.float32), CPU)
    fill_dummy(dict(model.targets()), seed=0)
    save_file({name: tensor.contiguous() for name, tensor in model.targets()}, folder / "model.safetensors")
    return folder

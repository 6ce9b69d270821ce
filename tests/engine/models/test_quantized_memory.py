"""The memory that quantising a checkpoint at load takes, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.conformance.models import make_checkpoint
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.models.config import parse_decoder, read_config
from tiercel.engine.models.decoder import Decoder
from tiercel.engine.models.precision import Precision
from tiercel.engine.models.torch_ops import TorchOps
from tiercel.engine.models.weights import fill_dummy

CPU = torch.device("cpu")

_MEASURE = """
import sys, threading, torch
torch.set_num_threads(1)
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.models.quantized_parts import QuantizedTarget
from tiercel.engine.models.registry import load_model
from tiercel.engine.models.torch_ops import TorchOps
from tiercel.engine.models.weights import fill_dummy
from tiercel.engine.native.library import find_library
from tiercel.settings.settings import EngineSettings

def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def load(folder):
    library = find_library() if sys.argv[4] == "native" else None
    attention = open_attention("native" if library else "sdpa", torch.device("cpu"))
    settings = EngineSettings(model=folder, dtype="bfloat16", quantization=sys.argv[3])
    return load_model(settings, torch.device("cpu"), attention, library=library)

load(sys.argv[2])  # so that imports, thread pools and caches do not count as weights
if sys.argv[5] == "keep":
    kept, keep = [], QuantizedTarget._keep
    QuantizedTarget._keep = lambda self, weight: (kept.append(weight), keep(self, weight))
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


@pytest.fixture(scope="module")
def hundred_megabytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 100 million weights in bfloat16, and a tiny one."""
    root = tmp_path_factory.mktemp("memory")
    make_checkpoint("llama3", root / "tiny")
    make_checkpoint("llama3", root / "big")
    config = json.loads((root / "big" / "config.json").read_text())
    sizes = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "intermediate_size": 2048}
    config |= sizes | {"num_hidden_layers": 24, "vocab_size": 512}
    (root / "big" / "config.json").write_text(json.dumps(config))
    decoder = Decoder(
        parse_decoder(read_config(root / "big")), TorchOps(SdpaAttention()), Precision.of(torch.bfloat16), CPU
    )
    fill_dummy(dict(decoder.targets()), seed=0)
    save_file(
        {name: t.contiguous() for name, t in decoder.targets() if isinstance(t, torch.Tensor)},
        root / "big" / "model.safetensors",
    )
    return root


@pytest.mark.slow
@pytest.mark.parametrize("products", ["torch", "native"])
@pytest.mark.parametrize("name", ["int4", "int8"])
def test_loading_takes_the_memory_of_the_packed_weights_and_little_more(
    name: str, products: str, hundred_megabytes: Path
) -> None:
    def measured(how: str) -> float:
        folders = str(hundred_megabytes / "big"), str(hundred_megabytes / "tiny")
        run = subprocess.run(
            [sys.executable, "-c", _MEASURE, *folders, name, products, how], capture_output=True, text=True, check=True
        )
        taken, weights = map(int, run.stdout.split())
        assert weights > 20_000_000
        return taken / weights

    ratio = measured("free")
    print(f"anonymous memory / packed weights = {ratio:.3f}")
    assert 0.9 < ratio < 1.2
    if (name, products) == ("int4", "torch"):
        assert measured("keep") > 1.2, "weights that are kept unpacked do not show"

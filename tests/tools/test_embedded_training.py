"""Tests of what training sees, and of the network that it trains."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiercel.embedded import MODEL_DIR
from tools.embedded.batches import ANSWER, LEAD, Encoder, Weights
from tools.embedded.grammar import assistant, prose_chat, recall_chat, user
from tools.embedded.network import Network, Shape, hf_weights
from tools.embedded.train import STAGES

TOKENIZER = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
ENCODER = Encoder(TOKENIZER)


@pytest.mark.parametrize("write", [recall_chat, prose_chat])
def test_training_uses_the_text_of_the_chat_template(write: object) -> None:
    template = AutoTokenizer.from_pretrained(MODEL_DIR)
    for seed in range(10):
        chat = write(Random(seed), 400)  # type: ignore[operator]
        messages = [{"role": turn.role, "content": turn.content} for turn in chat]
        text = template.apply_chat_template(messages, tokenize=False)
        assert ENCODER.encode([chat])[0][0] == TOKENIZER.encode(text).ids


def test_the_loss_counts_the_first_digit_of_an_answer_most() -> None:
    chat = (user("The code of Anna is 4821."), assistant("The code of Anna is 4821."))
    weights = Weights(other=0.0)
    batch = ENCODER.batch([chat], 64, weights, Random(0))
    heavy = batch.weights > 0
    assert batch.leads.sum() == 1
    assert TOKENIZER.decode(batch.targets[batch.leads].tolist()) == "4"
    assert TOKENIZER.decode(batch.targets[heavy].tolist()) == "The code of Anna is 4821."
    assert batch.weights[batch.leads].tolist() == [weights.lead]
    assert LEAD > ANSWER


def test_the_training_network_gives_the_results_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = Shape(vocab=64, hidden=64, layers=2, heads=2, kv_heads=1, head_size=32, inner=48, positions=64)
    network = Network(shape)
    (tmp_path / "config.json").write_text(json.dumps(shape.hf_config(1, 0)), "utf-8")
    save_file(hf_weights(network, torch.float32), tmp_path / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(0, 64, (2, 40))
    with torch.inference_mode():
        ours, theirs = network.logits(network(ids)), model(ids).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def test_the_curriculum_ends_at_a_low_rate_and_reaches_the_context_limit() -> None:
    assert STAGES[-1].last_rate is not None
    assert STAGES[-1].last_rate < STAGES[-1].rate / 10
    assert max(STAGES[-1].lengths) == 4096

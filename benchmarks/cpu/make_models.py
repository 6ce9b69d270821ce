"""Makes model folders with random weights for speed tests, each with a tokenizer of its own.

    python benchmarks/cpu/make_models.py FOLDER [--only qwen05b,llama1b]

qwen05b   the shapes of Qwen2 0.5B: hidden 896, 24 layers, 14 heads of 64, 2 for keys, bfloat16, 0.8 GB
llama1b   the shapes of Llama 3.2 1B: hidden 2,048, 16 layers, 32 heads of 64, 8 for keys, bfloat16, 2.1 GB
tiny      a Llama of 15 million parameters in float32, to check the set-up

The vocabulary is 32,768 (tiny: 8,192). Every server serves the same folder, no download is necessary, and the same
versions of Python, torch and transformers give the same bytes. Needs torch, transformers and tokenizers, as in
tiercel's environment."""

import argparse
import itertools
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

_MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
_ENDS = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 3}
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ModelShape(NamedTuple):
    """The configuration of a model without its vocabulary and tokens."""

    config: type[PretrainedConfig]
    seed: int
    dtype: torch.dtype
    vocabulary: int
    fields: dict[str, int | float | bool]


SHAPES = {
    "qwen05b": ModelShape(
        Qwen2Config, 2, torch.bfloat16, 32_768,
        {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
         "num_key_value_heads": 2, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
         "tie_word_embeddings": True},
    ),
    "llama1b": ModelShape(
        LlamaConfig, 3, torch.bfloat16, 32_768,
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5,
         "tie_word_embeddings": True},
    ),
    "tiny": ModelShape(
        LlamaConfig, 1, torch.float32, 8_192,
        {"hidden_size": 256, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
         "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 8_192, "rms_norm_eps": 1e-5,
         "tie_word_embeddings": False},
    ),
}  # fmt: skip


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on Python's own sources. llama.cpp's converter knows the split, which is that of GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(_MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sources(), trainer)
    missing = vocabulary - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<|spare_{number}|>" for number in range(missing)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_MARKS[0],
        eos_token=_MARKS[2],
        pad_token=_MARKS[3],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = _TEMPLATE
    return wrapped


def make_weights(shape: ModelShape) -> torch.nn.Module:
    """Make seeded random weights."""
    torch.manual_seed(shape.seed)
    config = shape.config(**shape.fields, vocab_size=shape.vocabulary, **_ENDS)
    return AutoModelForCausalLM.from_config(config, dtype=shape.dtype)


def _sources() -> Iterator[str]:
    """Yield the first thousand files of the standard library by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (file for file in sorted(root.rglob("*.py")) if "site-packages" not in file.parts)
    for file in itertools.islice(files, 1000):
        yield file.read_text(encoding="utf-8", errors="ignore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the model folders")
    parser.add_argument("--only", default=",".join(SHAPES), help="models, with commas; default: all")
    arguments = parser.parse_args()
    for name in arguments.only.split(","):
        if name not in SHAPES:
            parser.error(f"--only: {name!r} is unknown; known are {', '.join(SHAPES)}")
        shape, folder = SHAPES[name], arguments.folder / name
        make_tokenizer(shape.vocabulary).save_pretrained(folder)
        make_weights(shape).save_pretrained(folder)
        GenerationConfig(**_ENDS).save_pretrained(folder)
        print(folder)


if __name__ == "__main__":
    main()

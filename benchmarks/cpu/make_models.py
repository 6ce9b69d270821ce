"""Makes a model folder with random weights for speed tests: the shapes of Qwen2 0.5B and a tokenizer of its own.

    python make_model.py FOLDER [--tiny]

`--tiny` makes a model of 12 million parameters, to check the set-up before measuring. Every peer serves the same
folder, no download is necessary, and the same versions of torch and transformers give the same bytes. Needs torch,
transformers and tokenizers, as in tiercel's environment."""

import argparse
import itertools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, Qwen2Config

_VOCABULARY = 32_768
_MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_HALF = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
_TINY = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE (llama.cpp's converter knows the split of GPT-2), trained on Python's own sources."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sources(), trainer)
    missing = _VOCABULARY - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<|spare_{number}|>" for number in range(missing)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=_MARKS[0], eos_token=_MARKS[2], clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = _TEMPLATE
    return wrapped


def make_weights(tokenizer: PreTrainedTokenizerFast, shape: dict[str, int]) -> torch.nn.Module:
    """Make seeded random weights in bfloat16."""
    torch.manual_seed(20)
    config = Qwen2Config(
        **shape,
        vocab_size=_VOCABULARY,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _sources() -> Iterator[str]:
    """Return the first thousand files of the standard library by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (file for file in sorted(root.rglob("*.py")) if "site-packages" not in file.parts)
    for file in itertools.islice(files, 1000):
        yield file.read_text(encoding="utf-8", errors="ignore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    make_weights(tokenizer, _TINY if arguments.tiny else _HALF).save_pretrained(folder)
    ends = GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    ends.save_pretrained(folder)
    print(folder)


if __name__ == "__main__":
    main()

"""A model folder with only a config: Llama-3-8B, or a tiny model of its kind for trials without a GPU."""

import json
from pathlib import Path

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",  # the older name of the field
}
TINY = LLAMA_3_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
    "torch_dtype": "float32",
}


def write_model(folder: Path, config: dict[str, object], *, has_tokenizer: bool = False) -> Path:
    """Make the folder and return it. Its tokenizer has a word for every id, so that every token has a text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if has_tokenizer:
        from tokenizers import Tokenizer, models, pre_tokenizers  # lazy: only a server needs one

        vocab_size = config["vocab_size"]
        assert isinstance(vocab_size, int)
        words = {f"w{number}": number for number in range(vocab_size)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder

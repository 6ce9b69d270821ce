"""The configuration of a small Llama with random weights, for benchmarks that do not use the answers."""


def random_llama(**changes: int) -> dict[str, object]:
    """Return the fields of config.json: float32, tied embeddings, 8,192 positions; `changes` replace or add fields."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    } | changes

"""The upper bounds of the machine, by formula, with which figures are compared.

A decoding step reads and multiplies all weights, and reads the KV of every context. The serial bound assumes that one
happens after the other. The rates are those of one H200: its largest products, and a copy on the device.
"""

from dataclasses import dataclass

GEMM_FLOP_PER_S = 790e12  # bfloat16
COPY_BYTES_PER_S = 4.3e12  # read and written, together


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a dense decoder in bfloat16."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool = False

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the matrix products of a layer, fused as in the model."""
        width = self.heads * self.head_dim
        return {
            "qkv": (width + 2 * self.kv_heads * self.head_dim, self.hidden),
            "o": (self.hidden, width),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    @property
    def body_params(self) -> int:
        """Weights of all layers, without norms."""
        return self.layers * sum(outputs * inputs for outputs, inputs in self.linears.values())

    @property
    def head_params(self) -> int:
        """Return the number of weights of the head."""
        return self.vocab * self.hidden

    @property
    def params(self) -> int:
        """All weights."""
        return self.body_params + self.head_params * (1 if self.is_tied else 2)

    @property
    def token_bytes(self) -> int:
        """KV of one token in all layers."""
        return self.layers * self.kv_heads * 2 * self.head_dim * 2

    @property
    def layer_token_bytes(self) -> int:
        """Return the KV bytes of one token in one layer."""
        return self.token_bytes // self.layers


LLAMA_3_8B = ModelShape("Llama-3-8B", 32, 4096, 14336, 32, 8, 128, 128256)
QWEN3_8B = ModelShape("Qwen3-8B", 36, 4096, 12288, 32, 8, 128, 151936)


def optimal_tokens_per_s(model: ModelShape, flop_per_s: float = GEMM_FLOP_PER_S) -> float:
    """Return prompt and output tokens per second if only matrix products took time.

    Source: NanoFlow (arXiv 2408.12757) section 3.
    """
    return flop_per_s / (2 * model.params)


def serial_step_s(
    model: ModelShape,
    batch: int,
    context: float,
    flop_per_s: float = GEMM_FLOP_PER_S,
    bytes_per_s: float = COPY_BYTES_PER_S,
) -> float:
    """Return the minimum time of a decoding step in which products and reading of KV do not overlap."""
    weights = model.body_params + model.head_params
    products_s = max(2 * weights / bytes_per_s, 2 * batch * weights / flop_per_s)
    return products_s + batch * context * model.token_bytes / bytes_per_s

"""The blocks of GGUF files: every type of 4 to 8 bits has an exact image in the canonical form.

Layouts: ggml-common.h and ggml-quants.c of https://github.com/ggml-org/ggml.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.engine.models.config import ConfigFields
from tiercel.engine.models.format_gptq import draw_affine
from tiercel.engine.models.quantization import (
    UNSUPPORTED,
    LayerFormat,
    NamePattern,
    Rule,
    Scheme,
    StoredTensor,
    WrongTensorError,
    check_finite,
)
from tiercel.engine.models.quantized_weight import QuantizedWeight
from tiercel.modelfile.header import BLOCK_TYPES, BlockType
from tiercel.values.errors import ConfigError

_READ_NUMBERS = 1 << 20  # at once; several tensors of one byte each are made of them
_EMBEDDING = "model.embed_tokens"


@dataclass(frozen=True, slots=True)
class BlockContent:
    """The content of n blocks: values [n, numbers] int8, scales and offsets [n, groups] float32."""

    values: Tensor
    scales: Tensor
    offsets: Tensor | None = None


@dataclass(frozen=True, slots=True)
class BlockCode:
    """The image of one type of blocks. `decode` reads blocks [n, nbytes] uint8."""

    bits: int
    group_size: int
    has_offsets: bool
    decode: Callable[[Tensor], BlockContent]


def _float16(blocks: Tensor, start: int) -> Tensor:
    """Return the number that is at this byte of each block. Shapes: [n, nbytes] uint8 -> [n, 1] float32."""
    return check_finite("weight", blocks[:, start : start + 2].contiguous().view(torch.float16))


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """Return integers of 4 bits: of each run of bytes the low halves, then the high ones. [n, m] -> [n, 2 m] uint8."""
    runs = packed.unflatten(1, (-1, run))
    return torch.stack((runs & 15, runs >> 4), dim=2).flatten(1)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Return the bits of 4 bytes, the lowest first, each as 16. Shapes: [n, nbytes] uint8 -> [n, 32] uint8."""
    places = torch.arange(8, dtype=torch.uint8)
    return (((blocks[:, start : start + 4, None] >> places) & 1) << 4).flatten(1)


def _q8_0(blocks: Tensor) -> BlockContent:
    return BlockContent(blocks[:, 2:].view(torch.int8), _float16(blocks, 0))


def _q4_0(blocks: Tensor) -> BlockContent:
    return BlockContent(_nibbles(blocks[:, 2:], 16).view(torch.int8) - 8, _float16(blocks, 0))


def _q4_1(blocks: Tensor) -> BlockContent:
    return BlockContent(_nibbles(blocks[:, 4:], 16).view(torch.int8), _float16(blocks, 0), _float16(blocks, 2))


def _q5_0(blocks: Tensor) -> BlockContent:
    values = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks, 2)
    return BlockContent(values.view(torch.int8) - 16, _float16(blocks, 0))


def _q5_1(blocks: Tensor) -> BlockContent:
    values = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks, 4)
    return BlockContent(values.view(torch.int8), _float16(blocks, 0), _float16(blocks, 2))


def _scales_and_offsets(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return those of the 8 groups of Q4_K and Q5_K: integers of 6 bits in 12 bytes, times two numbers of the block."""
    low, middle, high = blocks[:, 4:16].split(4, dim=1)
    scales = torch.cat((low & 63, (high & 15) | (low >> 2 & 48)), dim=1)
    offsets = torch.cat((middle & 63, (high >> 4) | (middle >> 2 & 48)), dim=1)
    return _float16(blocks, 0) * scales.float(), -(_float16(blocks, 2) * offsets.float())


def _q4_k(blocks: Tensor) -> BlockContent:
    return BlockContent(_nibbles(blocks[:, 16:], 32).view(torch.int8), *_scales_and_offsets(blocks))


def _q5_k(blocks: Tensor) -> BlockContent:
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = ((blocks[:, None, 16:48] >> places) & 1) << 4  # bit g of byte i belongs to input i of group g
    values = _nibbles(blocks[:, 48:], 32) | fifth.flatten(1)
    return BlockContent(values.view(torch.int8), *_scales_and_offsets(blocks))


def _q6_k(blocks: Tensor) -> BlockContent:
    places = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> places & 3) << 4
    values = _nibbles(blocks[:, :128], 64) | high.flatten(1)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return BlockContent(values.view(torch.int8) - 32, _float16(blocks, 208) * scales)


BLOCK_CODES: Mapping[str, BlockCode] = {
    "Q8_0": BlockCode(8, 32, False, _q8_0),
    "Q4_0": BlockCode(4, 32, False, _q4_0),
    "Q4_1": BlockCode(4, 32, True, _q4_1),
    "Q5_0": BlockCode(8, 32, False, _q5_0),
    "Q5_1": BlockCode(8, 32, True, _q5_1),
    "Q4_K": BlockCode(4, 32, True, _q4_k),
    "Q5_K": BlockCode(8, 32, True, _q5_k),
    "Q6_K": BlockCode(8, 16, False, _q6_k),
}
"""The image of each type that is not stored as floating-point numbers. 5 and 6 bits become 8."""


@dataclass(frozen=True, slots=True)
class GgufFormat:
    """A weight as a GGUF file stores it, in blocks of one type, which is one of `BLOCK_CODES`."""

    block: BlockType

    @property
    def _code(self) -> BlockCode:
        return BLOCK_CODES[self.block.name]

    @property
    def text(self) -> str:
        """See `LayerFormat.text`."""
        return self.block.name

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """See `LayerFormat.tensors`. The tensor has the bytes of each row's blocks."""
        row = inputs // self.block.numbers * self.block.nbytes
        return {"weight": StoredTensor(("weight",), (torch.uint8,), ((outputs, row),))}

    def stored_bytes(self, outputs: int, inputs: int) -> int:
        """See `LayerFormat.stored_bytes`. Scales that do not fit 16 bits take twice what is counted here."""
        code = self._code
        groups = outputs * (inputs // code.group_size)
        return outputs * inputs * code.bits // 8 + groups * (4 if code.has_offsets else 2)

    def read(self, found: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        """See `LayerFormat.read`."""
        if inputs % self.block.numbers:
            raise WrongTensorError("weight", f"{self.block.name} has blocks of {self.block.numbers} numbers")
        code, groups = self._code, inputs // self._code.group_size
        values, scales = torch.empty(outputs, inputs, dtype=torch.int8), torch.empty(outputs, groups)
        offsets = torch.empty(outputs, groups) if code.has_offsets else None
        rows = max(1, _READ_NUMBERS // inputs)
        for start in range(0, outputs, rows):
            part = slice(start, start + rows)
            content = code.decode(found["weight"][part].reshape(-1, self.block.nbytes))
            values[part] = content.values.reshape(-1, inputs)
            scales[part] = content.scales.reshape(-1, groups)
            if offsets is not None and content.offsets is not None:
                offsets[part] = content.offsets.reshape(-1, groups)
        return QuantizedWeight(values, scales, offsets, None, code.group_size, code.bits)

    def draw(self, weight: Tensor) -> QuantizedWeight:
        """See `LayerFormat.draw`."""
        return draw_affine(weight, self._code.bits, self._code.group_size, not self._code.has_offsets)


def read_gguf(fields: ConfigFields) -> Scheme:
    """Return the scheme of a folder that a GGUF file was unfolded into: the layers of each type of blocks.

    Errors: ConfigError naming the field.
    """
    layers = fields.object("layers")
    if layers is None:
        raise ConfigError("model.field_missing", f"{fields.source}: layers is missing")
    types = {block.name: block for block in BLOCK_TYPES.values() if block.name in BLOCK_CODES}
    rules: list[Rule] = []
    embedding: LayerFormat | None = None
    for name, found in layers.as_object().items():
        if name not in types:
            raise ConfigError(UNSUPPORTED, f"{layers.source}: {name:.200} is not supported; known: {', '.join(types)}")
        if not isinstance(found, list) or not all(isinstance(layer, str) for layer in found):
            raise ConfigError("model.field_wrong", f"{layers.source}: {name} must be a list of names")
        form = GgufFormat(types[name])
        rules.append(Rule(tuple(NamePattern("exact", layer) for layer in found), form))
        embedding = form if _EMBEDDING in found else embedding
    identity = f"gguf {json.dumps(fields.as_object(), sort_keys=True)}"
    return Scheme("gguf", identity, tuple(rules), embedding is not None, embedding)

"""Formats of quantised weights in checkpoints: which layers, in which tensors, and their canonical form."""

import re
import warnings
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from tiercel.engine.models.config import ConfigFields
from tiercel.engine.models.quantized_weight import QuantizedWeight
from tiercel.values.errors import ConfigError

UNSUPPORTED = "model.unsupported"
"""Error code of a scheme that neither implementation can run."""


MAX_GROUP = 1 << 16
"""Most inputs that share a scale where a configuration tells how many."""


class WrongTensorError(Exception):
    """A tensor of a checkpoint cannot be read. `role` is its key in `LayerFormat.tensors`."""

    def __init__(self, role: str, reason: str) -> None:
        super().__init__(role, reason)
        self.role = role
        self.reason = reason


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that a checkpoint has for a layer. `names` follow the layer's name and a dot; the first found counts."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]  # the allowed ones
    is_optional: bool = False


class LayerFormat(Protocol):
    """The storage of the weight of one linear layer. Formats are values: equal ones store and compute the same."""

    @property
    def text(self) -> str:
        """The format in a few words, for people."""
        ...

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """Return the tensors of a layer of this name and size, each by its role.

        Errors: ConfigError if the format cannot hold a weight of this size.
        """
        ...

    def stored_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes that a layer of this size takes in memory, as `CompactWeight` keeps it."""
        ...

    def read(self, found: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        """Return the weight in the canonical form, on the CPU. `found` has tensors of the right shapes by role.

        Errors: WrongTensorError.
        """
        ...

    def draw(self, weight: Tensor) -> QuantizedWeight:
        """Return a weight of this format that is near `weight`, for dummy weights. Shapes: [outputs, inputs]."""
        ...


PatternKind = Literal["exact", "regex", "part", "class"]


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A pattern for names of layers.

    exact: the whole name; regex: a regular expression for the beginning of the name; part: one or more whole components
    of the name anywhere in it; class: every linear layer.
    """

    kind: PatternKind
    text: str

    def matches(self, layer: str) -> bool:
        """Return whether the layer of this name is meant."""
        match self.kind:
            case "exact":
                return layer == self.text
            case "regex":
                return _compiled(self.text).match(layer) is not None
            case "part":
                return f".{self.text}." in f".{layer}."
            case "class":
                return True


@dataclass(frozen=True, slots=True)
class Rule:
    """The format of all layers that match one of the patterns; None: they stay as they are."""

    patterns: tuple[NamePattern, ...]
    format: LayerFormat | None


@dataclass(frozen=True, slots=True)
class Scheme:
    """The quantisation of a model: the first rule that matches a layer's name holds for it.

    name:                       for people, with the formats of the layers
    identity:                   a text that differs for every scheme, as part of a model's fingerprint
    quantizes_shared_embedding: whether an embedding that is the head, too, is stored as the head is
    embedding:                  the format of an embedding that is not the head; it is dequantised when it is read
    skipped:                    endings of names of tensors that are not read, such as scales of KV in 8 bits
    """

    name: str
    identity: str
    rules: tuple[Rule, ...]
    quantizes_shared_embedding: bool = False
    embedding: LayerFormat | None = None
    skipped: tuple[str, ...] = ()

    def layer(self, name: str) -> LayerFormat | None:
        """Return how the linear layer of this name is stored; None if it is not quantised."""
        for rule in self.rules:
            if any(pattern.matches(name) for pattern in rule.patterns):
                return rule.format
        return None

    def __str__(self) -> str:
        """Return the name and the formats."""
        texts = dict.fromkeys(rule.format.text for rule in self.rules if rule.format is not None)
        return f"{self.name}: {'; '.join(texts)}" if texts else self.name


def _compiled(text: str) -> re.Pattern[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of expressions whose meaning may change in later versions of Python
        return re.compile(text)


def read_pattern(text: object, source: str, plain: PatternKind = "exact") -> NamePattern:
    """Return the pattern of a list such as `ignore`: `re:` begins a regular expression, other text is of kind `plain`.

    Errors: ConfigError naming the field if it is not a text or not a valid expression.
    """
    if not isinstance(text, str) or not text or len(text) > 1000:
        raise ConfigError("model.field_wrong", f"{source} must list names of up to 1000 characters, not {text!r:.200}")
    if not text.startswith("re:"):
        return NamePattern(plain, text.strip("."))
    expression = text.removeprefix("re:")
    check_expression(expression, source)
    return NamePattern("regex", expression)


def check_expression(expression: str, source: str) -> None:
    """Errors: ConfigError if this is not a valid regular expression."""
    try:
        _compiled(expression)
    except (re.error, OverflowError, RecursionError) as exc:
        shown = f"{expression!r:.200}"
        raise ConfigError("model.field_wrong", f"{source}: {shown} is not a regular expression: {exc}") from exc


def read_patterns(value: object, source: str, plain: PatternKind = "exact") -> tuple[NamePattern, ...]:
    """Return the patterns of a list; null is an empty one. Errors: ConfigError naming the field."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ConfigError("model.field_wrong", f"{source} must be a list, not {value!r:.200}")
    return tuple(read_pattern(text, source, plain) for text in value)


def read_block(value: object, source: str) -> tuple[int, int]:
    """Return the outputs and inputs of a block from a list of two numbers. Errors: ConfigError naming the field."""
    if isinstance(value, list) and len(value) == 2:
        rows, columns = value
        if type(rows) is int and type(columns) is int and 1 <= rows <= MAX_GROUP and 1 <= columns <= MAX_GROUP:
            return rows, columns
    raise ConfigError("model.field_wrong", f"{source} must be two numbers from 1 to {MAX_GROUP:,}, not {value!r:.200}")


def read_group_size(fields: ConfigFields, default: int) -> int:
    """Return the field `group_size`: -1 or a number of inputs. Errors: ConfigError naming the field."""
    size = fields.read("group_size", int, default)
    if size != -1 and not 1 <= size <= MAX_GROUP:
        raise ConfigError(
            "model.field_wrong", f"{fields.source}: group_size must be -1 or from 1 to {MAX_GROUP:,}, not {size}"
        )
    return size


def group_size_for(layer: str, inputs: int, group_size: int, source: str) -> int:
    """Return the number of inputs in a group; -1 stands for all. Errors: ConfigError if it does not divide them."""
    size = inputs if group_size == -1 else group_size
    if inputs % size:
        raise ConfigError(
            UNSUPPORTED, f"{source}: group_size ({size}) must divide the {inputs:,} inputs of {layer} without rest"
        )
    return size


def count_bytes(outputs: int, inputs: int, bits: int, group_size: int, has_offsets: bool = False) -> int:
    """Return the bytes of a weight of this size: the values, and for each group a scale of 16 bits and an offset."""
    groups = outputs * (inputs // group_size)
    return outputs * inputs * bits // 8 + groups * (6 if has_offsets else 2)


def check_finite(role: str, tensor: Tensor) -> Tensor:
    """Return a tensor of scales in float32. Errors: WrongTensorError if one is infinite or not a number."""
    wide = tensor.float()
    if not bool(torch.isfinite(wide).all()):
        raise WrongTensorError(role, "a scale is infinite or not a number")
    return wide


def order_of(role: str, group_by_input: Tensor, group_size: int) -> Tensor | None:
    """Return the permutation that makes groups adjoin; None if they do. Shapes: [inputs] int32 -> [inputs] int64.

    Errors: WrongTensorError if a group does not have `group_size` inputs.
    """
    inputs = group_by_input.numel()
    wide = group_by_input.to(torch.int64)
    adjoining = torch.arange(inputs) // group_size
    if torch.equal(wide, adjoining):
        return None
    order = torch.argsort(wide, stable=True)
    if not torch.equal(wide[order], adjoining):
        raise WrongTensorError(role, f"every group must have {group_size} of the {inputs} inputs")
    return order


def text_of_groups(group_size: int) -> str:
    """Return the granularity of scales in words."""
    return "a scale per output" if group_size == -1 else f"groups of {group_size}"


def roles_of(tensors: Mapping[str, StoredTensor], layer: str, names: Container[str]) -> dict[str, str]:
    """Return which of the checkpoint's `names` has which role for a layer. Missing roles are left out."""
    found: dict[str, str] = {}
    for role, stored in tensors.items():
        for suffix in stored.names:
            if (name := f"{layer}.{suffix}") in names:
                found[role] = name
                break
    return found

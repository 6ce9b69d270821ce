"""Checkpoints that have the experts of a layer in two tensors: the view of them as tensors of single experts."""

import re
from collections.abc import Iterator
from functools import partial

from tiercel.engine.models.config import DecoderConfig
from tiercel.engine.models.mixture_config import MixtureConfig
from tiercel.engine.models.weights import Rename, TensorFiles, TensorPiece
from tiercel.values.errors import ConfigError

_FUSED = re.compile(r"(model\.layers\.\d+\.)mlp\.experts\.(gate_up_proj|down_proj)")
_ROUTER = re.compile(r"(model\.layers\.\d+\.)mlp\.gate\.weight")


def renaming_of(config: DecoderConfig) -> Rename | None:
    """Return how the tensors of a checkpoint of this model are renamed; None: not at all."""
    mixture = config.mixture
    return None if mixture is None else partial(split_experts, config=mixture, hidden_size=config.hidden_size)


def split_experts(tensors: TensorFiles, config: MixtureConfig, hidden_size: int) -> TensorFiles:
    """Return the tensors of a checkpoint under the names of checkpoints that have one tensor for each expert.

    transformers 5 has `mlp.experts.gate_up_proj` [experts, 2 * inner, hidden] and `mlp.experts.down_proj` [experts,
    hidden, inner] in its memory, and writes them with `save_pretrained(..., save_original_format=False)`, for all
    families alike. A checkpoint without such tensors is returned as it is.

    Cost:   reads no content.
    Errors: ConfigError naming file and tensor if such a tensor has another shape.
    """
    fused = {name: match for name in tensors if (match := _FUSED.fullmatch(name))}
    if not fused:
        return tensors
    pieces: dict[str, TensorPiece] = {}
    for name in tensors:
        if (match := fused.get(name)) is not None:
            pieces |= dict(_pieces_of(tensors, name, match, config, hidden_size))
        elif (router := _ROUTER.fullmatch(name)) is not None:
            pieces[f"{router[1]}{config.names.block}gate.weight"] = TensorPiece(name)
        else:
            pieces[name] = TensorPiece(name)
    return tensors.of_pieces(pieces)


def _pieces_of(
    tensors: TensorFiles, name: str, match: re.Match[str], config: MixtureConfig, hidden_size: int
) -> Iterator[tuple[str, TensorPiece]]:
    inner, names = config.inner_size, config.names
    is_down = match[2] == "down_proj"
    wanted = (config.experts, hidden_size, inner) if is_down else (config.experts, 2 * inner, hidden_size)
    if (shape := tensors.shape(name)) != wanted:
        shown = f"shape {list(shape)}, not {list(wanted)} (experts, outputs, inputs)"
        raise ConfigError("weights.shape", f"{tensors.path(name)}: tensor {name}: {shown}")
    for expert in range(config.experts):
        place = f"{match[1]}{names.block}experts.{expert}."
        if is_down:
            yield f"{place}{names.down}.weight", TensorPiece(name, expert)
        else:
            yield f"{place}{names.gate}.weight", TensorPiece(name, expert, 0, inner)
            yield f"{place}{names.up}.weight", TensorPiece(name, expert, inner, 2 * inner)

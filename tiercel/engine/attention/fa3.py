"""FlashAttention-3, the fastest attention on a Hopper GPU, from its own wheel or from vLLM's."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from tiercel.engine.attention.base import PagedReader
from tiercel.engine.attention.cache_rows import write_rows
from tiercel.engine.forward.kv_cache import is_quantized
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.system.file_fault import is_there, list_folder
from tiercel.values.errors import ConfigError

PACKAGE = "flash_attn_interface"  # of the wheel flash_attn_3; importing it registers the operator
_EXTENSION = "flash_attn_3._C"  # the extension itself, in wheels that have it as a package
_VLLM = "vllm"
_VLLM_FOLDER, _VLLM_LIBRARY = "vllm_flash_attn", "_vllm_fa3_C*.so"  # inside vLLM's package

_GIVEN = (
    *("q", "k", "v", "cu_seqlens_q", "seqused_k", "max_seqlen_q", "page_table", "softmax_scale", "is_causal"),
    *("window_size_left", "window_size_right", "softcap", "num_splits"),
)  # the arguments that `Fa3Attention.read` gives
_NEUTRAL: Mapping[str, object] = {
    "attention_chunk": 0,
    "is_rotary_interleaved": False,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}
"""Values without effect for arguments that have no default in vLLM's schema; optional ones are None."""

_MAX_SPLITS = 32
_MAX_SEQUENCES = 992  # up to which the operator computes on the device how many parts each context needs
_SCRATCH_BYTES = 128 * 1024 * 1024  # of the parts of a split step
_TILE_ROWS = 128  # of the kernel: tokens times the heads of a group
_MAX_HEAD_DIM = 256
_MAX_BLOCK_SIZE = 63  # the kernel's smallest tile is 64 keys, and blocks of whole tiles are read to their end

Forward = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Fa3Operator:
    """The operator `fwd`, called by the names of its arguments, and the package that it comes from."""

    forward: Forward
    source: str


def has_fa3() -> bool:
    """Return whether a package with the operator is installed, without importing it."""
    return bool(_loaders())


def load_fa3() -> Fa3Operator:
    """Return the operator of the first package that has one, the official wheel first.

    Errors: ConfigError if no package is installed, or none of them loads with this torch.
    """
    reasons: list[str] = []
    for name, load in _loaders().items():
        try:
            return Fa3Operator(load(), name)
        except (ImportError, OSError, AttributeError, RuntimeError, ValueError) as exc:
            reasons.append(f"{name} does not load: {exc}")
    if not reasons:
        raise ConfigError(
            "attention.no_fa3", "--attention-backend fa3: neither the package flash_attn_3 nor vLLM is installed"
        )
    raise ConfigError("attention.fa3_broken", f"--attention-backend fa3: {'; '.join(reasons)}")


def _loaders() -> dict[str, Callable[[], Forward]]:
    """Return a function for each package that is installed and has the operator; none of them is imported."""
    found: dict[str, Callable[[], Forward]] = {}
    if find_spec(_EXTENSION.partition(".")[0]) is not None:
        found[_EXTENSION] = partial(_load_module, _EXTENSION)
    if find_spec(PACKAGE) is not None:
        found[PACKAGE] = partial(_load_module, PACKAGE)
    library = _vllm_library()
    if library is not None:
        found[_VLLM] = partial(_load_library, library)
    return found


def _load_module(name: str) -> Forward:
    import_module(name)
    return with_neutral(torch.ops.flash_attn_3.fwd)


def _load_library(path: Path) -> Forward:
    """Load vLLM's extension by its path: vLLM itself, which takes seconds and sets up a lot, is not imported."""
    torch.ops.load_library(str(path))
    return with_neutral(torch.ops._vllm_fa3_C.fwd)


def _vllm_library() -> Path | None:
    spec = find_spec(_VLLM)
    packages = () if spec is None else spec.submodule_search_locations or ()
    folders = [Path(package) / _VLLM_FOLDER for package in packages]
    return next((path for folder in folders if is_there(folder) for path in list_folder(folder, _VLLM_LIBRARY)), None)


def with_neutral(operator: Forward) -> Forward:
    """Return an operator that needs no other arguments than those of `Fa3Attention.read`.

    The official schema has a default for every other argument, vLLM's has none, and it grows: it has sinks and context
    parallelism since 2025.
    Errors: ValueError if the operator has not these arguments, or needs one that is unknown here.
    Source: hopper/flash_api.cpp of Dao-AILab/flash-attention, hopper/flash_api_torch_lib.cpp of
            vllm-project/flash-attention.
    """
    arguments = operator.default._schema.arguments  # type: ignore[attr-defined]
    missing = set(_GIVEN) - {argument.name for argument in arguments}
    if missing:
        raise ValueError(f"the operator has no argument {', '.join(sorted(missing))}")
    neutral: dict[str, object] = {}
    for argument in arguments:
        if argument.name in _GIVEN or argument.has_default_value():
            continue
        if argument.name in _NEUTRAL:
            neutral[argument.name] = _NEUTRAL[argument.name]
        elif isinstance(argument.type, torch.OptionalType):
            neutral[argument.name] = None
        else:
            raise ValueError(f"the operator needs the unknown argument {argument.name}")
    return partial(operator, **neutral) if neutral else operator


@dataclass(frozen=True, slots=True)
class Fa3Layout:
    """The operator's view of a step, made by the first layer and used by all others.

    Shapes: table [S, blocks] int32.
    """

    state: ForwardState
    table: Tensor
    longest: int  # slice, in tokens


class Fa3Attention:
    """Writes keys and values in plain torch; the operator reads them through strided views of the cache.

    A CUDA graph can hold a decode: its slices have one token, the table has the width of the graph's input, and every
    other length is on the device. Steps in which all slices have one token may be left to the spare.
    """

    name = "fa3"

    def __init__(self, operator: Fa3Operator, processors: int, spare: PagedReader | None = None) -> None:
        """`processors`: streaming multiprocessors; `spare`: the backend for layers that the operator cannot compute."""
        self.is_capturable = spare is None or spare.is_capturable
        self.source = operator.source
        self.leaves_decodes = False  # to the spare; `engine.measure.decode_choice` decides, before a graph is recorded
        self._forward = operator.forward
        self._processors = processors
        self._spare = spare
        self._layouts: deque[Fa3Layout] = deque(maxlen=2)  # of the last nano-batches

    @property
    def has_spare(self) -> bool:
        """Whether another backend could compute any layer."""
        return self._spare is not None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams
    ) -> Tensor:
        """See `Attention.attend`. Errors: see `read`."""
        write_rows(key, value, kv, state)
        return self.read(query, kv, state, params)

    def read(self, query: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams) -> Tensor:
        """See `PagedReader.read`. Errors: ConfigError if neither the operator nor a spare can compute the layer."""
        obstacle = _find_obstacle(query, kv, params)
        if obstacle is not None:
            if self._spare is None:
                raise ConfigError("attention.fa3_unable", f"--attention-backend fa3 has no {obstacle}: use triton")
            return self._spare.read(query, kv, state, params)
        if self.leaves_decodes and state.is_decode and self._spare is not None:
            return self._spare.read(query, kv, state, params)
        head_dim = query.shape[2]
        layout = self._layout(state)
        return self._forward(
            query,
            kv[..., :head_dim],
            kv[..., head_dim:],
            cu_seqlens_q=state.device_query_starts,
            seqused_k=state.device_context_lengths,
            max_seqlen_q=layout.longest,
            page_table=layout.table,
            softmax_scale=params.scale,
            is_causal=True,
            window_size_left=-1 if params.window is None else params.window - 1,
            window_size_right=0,
            softcap=params.softcap or 0.0,
            num_splits=self._choose_splits(query, kv.shape[2], state.num_sequences, layout.longest),
        )[0]

    def _layout(self, state: ForwardState) -> Fa3Layout:
        """Return the layout of this step, cached by its state; the recording of a graph uses a state of its own."""
        for layout in self._layouts:
            if layout.state is state:
                return layout
        starts = state.query_starts
        longest = max(end - start for start, end in pairwise(starts))
        table = state.block_tables.to(torch.int32)
        self._layouts.append(Fa3Layout(state, table, longest))
        return self._layouts[-1]

    def _choose_splits(self, query: Tensor, kv_heads: int, sequences: int, longest: int) -> int:
        """Return the maximum number of parts of each context; the operator uses fewer for short contexts.

        Like the operator's own heuristic, this assumes that a single sequence has to occupy the processors. It also
        limits the scratch memory, which is T * heads * head_dim floats per part. With more than 992 sequences the
        operator would cut every context into exactly this number, so the number is 1.
        """
        if sequences > _MAX_SEQUENCES:
            return 1
        group = query.shape[1] // kv_heads
        wanted = self._processors // (kv_heads * -(-longest * group // _TILE_ROWS))
        fitting = _SCRATCH_BYTES // (4 * query.numel())
        return max(1, min(_MAX_SPLITS, wanted, fitting))


def _find_obstacle(query: Tensor, kv: Tensor, params: AttentionParams) -> str | None:
    """Return in words why the operator cannot compute this layer; None if it can."""
    head_dim, block_size = query.shape[2], kv.shape[1]
    if params.sinks is not None:
        return "attention sinks"
    if is_quantized(kv):
        return "cache of 8 bits (--kv-cache-dtype)"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"{str(query.dtype).removeprefix('torch.')}"
    if head_dim > _MAX_HEAD_DIM or head_dim % 8 != 0:
        return f"heads of {head_dim} (multiples of 8 up to {_MAX_HEAD_DIM})"
    if block_size > _MAX_BLOCK_SIZE:
        return f"blocks of {block_size} tokens (--block-size up to {_MAX_BLOCK_SIZE})"
    return None

"""The native kernel of the sampler for the CPU: temperature, filters, noise and maximum in one pass."""

import torch
from torch import Tensor

from tiercel.engine.native.library import NativeLibrary
from tiercel.engine.native.table import TYPE_BY_DTYPE
from tiercel.engine.sampling.masks import Masks

_BLOCK = 128  # `kBlock` of engine/native/src/sampling.h
_ROOM = 4  # floats per token and thread


class NativeDraw:
    """Draws tokens like `engine.kernels.sampling.draw_no_sync`, and applies masks, min_p, top_k and top_p.

    The noise has the bits of `engine.sampling.noise` before its logarithms, and the limits of the filters are those of
    `engine.sampling.filter` up to rounding. Keeps scratch memory; one thread uses it at a time.
    """

    def __init__(self, library: NativeLibrary) -> None:
        self._draw_rows = library.draw_rows
        self._room = torch.empty(0)

    def __call__(self, logits: Tensor, draws: Tensor, masks: Masks | None = None) -> tuple[Tensor, Tensor]:
        """Return one token per row, and whether the row is bad: its largest logit is not finite, or a logit is a NaN.

        `masks`: the tokens that may be drawn; those of others do not count for the filters. A row is bad whatever its
        mask excludes.

        Shapes: logits [N, vocab] of any float, rows contiguous; draws [N, len(DrawColumn)] int32 (see `DrawColumn`);
                returns [N] int64 and [N] bool.
        Cost:   one pass over the logits; five over the scores of a row with filters, in scratch memory that stays in
                the processor's cache.
        """
        rows, vocab_size = logits.shape
        tokens, bad_rows = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
        room_size = _ROOM * -(-vocab_size // _BLOCK) * _BLOCK * torch.get_num_threads()
        if self._room.numel() < room_size:
            self._room = torch.empty(room_size)  # the system allocates pages when a row with filters is drawn
        addresses = None if masks is None else masks.addresses()
        self._draw_rows(
            *(TYPE_BY_DTYPE[logits.dtype], logits.data_ptr(), logits.stride(0), rows, vocab_size, draws.data_ptr()),
            *(None if addresses is None else addresses.ctypes.data, self._room.data_ptr()),
            *(tokens.data_ptr(), bad_rows.data_ptr()),
        )
        return tokens, bad_rows

"""Masks: one bit for each token that a row may draw, and their effect on scores."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiercel.engine.sampling.upload import CopyLink, HostLink

_ALL = np.int32(-1)  # every bit set: no token is excluded
_BITS = (np.arange(256)[:, None] >> np.arange(8)) & 1
_LIMITS = np.where(_BITS == 1, np.inf, -np.inf).astype(np.float32)  # [256, 8]: of the eight scores of each byte


@dataclass(frozen=True, slots=True)
class Masks:
    """The tokens that the rows of a batch may draw.

    words:        [M, vocab / 32, rounded up], a line contiguous; token t is bit t % 32 of word t // 32
    place_of_row: [N], the line of each row; -1: the row may draw all
    """

    words: NDArray[np.int32]
    place_of_row: NDArray[np.int64]

    def addresses(self) -> NDArray[np.int64]:
        """Return where the line of each row is; 0 for a row without one. Valid as long as `words`. Shapes: [N]."""
        places = self.place_of_row
        return np.where(places < 0, 0, self.words.ctypes.data + self.words.strides[0] * places)

    def lines(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the bits of some rows, all set where a row has no line. Shapes: rows [R]; returns [R, words]."""
        places = self.place_of_row[rows]
        if (places >= 0).all():
            return self.words[places]
        lines = np.full((len(rows), self.words.shape[1]), _ALL)
        lines[places >= 0] = self.words[places[places >= 0]]
        return lines


def exclude_no_sync(scores: Tensor, words: NDArray[np.int32], link: HostLink | None = None) -> None:
    """Set the scores of tokens that may not be drawn to -inf.

    Shapes: scores [M, vocab], changed; words [M, vocab / 32, rounded up].
    """
    vocab_size = scores.shape[1]
    if scores.device.type == "cpu":
        # The minimum with the limits takes a fifth of the time of a masked fill, which branches.
        limits = np.take(_LIMITS, words.view(np.uint8), axis=0).reshape(len(words), -1)
        torch.minimum(scores, torch.from_numpy(limits)[:, :vocab_size], out=scores)
        return
    octets = (link or CopyLink(scores.device)).send_no_sync(words.view(np.uint8))
    scores.masked_fill_(excluded_no_sync(octets, vocab_size), -torch.inf)


def excluded_no_sync(octets: Tensor, vocab_size: int) -> Tensor:
    """Return which tokens are excluded, computed on the device of the bits.

    Shapes: octets [M, 4 * words] uint8, the bytes of the bits; returns [M, vocab_size] bool.
    Cost:   three kernels, two bytes of temporary memory per score.
    """
    places = torch.arange(8, dtype=torch.uint8, device=octets.device)
    return (((octets[:, :, None] >> places) & 1) == 0).view(len(octets), -1)[:, :vocab_size]


def can_draw_others(words: NDArray[np.int32], banned: NDArray[np.int64]) -> bool:
    """Return whether a row may draw a token that is not banned. Shapes: words of one row; banned [B], distinct ids."""
    allowed = int(np.bitwise_count(words.view(np.uint32)).sum())
    return allowed > int(np.count_nonzero((words[banned // 32] >> (banned % 32).astype(np.int32)) & 1))

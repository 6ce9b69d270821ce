"""Muon in single precision: torch's own computes in bfloat16, which is slow on processors without it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

TURNS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the Newton-Schulz iteration (Jordan et al., 2024)."""


def _orthogonal(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrices, roughly, of [n, rows, columns] with rows <= columns."""
    first, second, third = TURNS
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = first * x + (second * gram + third * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal before they are added to the weights.

    Matrices of one shape are computed together. The step is scaled to the size of a step of
    AdamW at the same learning rate (0.2 root-mean-square), as torch's "match_rms_adamw" does.
    """

    def __init__(self, matrices: Sequence[nn.Parameter], lr: float = 1e-3, weight_decay: float = 0.02) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Move the weights along their gradients."""
        for group in self.param_groups:
            alike: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    alike[tuple(sorted(weight.shape))].append(weight)
            for weights in alike.values():
                self._step(weights, group["lr"], group["weight_decay"], group["momentum"])

    def _step(self, weights: Sequence[nn.Parameter], lr: float, decay: float, momentum: float) -> None:
        updates: list[Tensor] = []
        for weight in weights:
            mean = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
            assert weight.grad is not None
            mean.lerp_(weight.grad, 1 - momentum)
            ahead = weight.grad.lerp(mean, momentum)
            updates.append(ahead if ahead.shape[0] <= ahead.shape[1] else ahead.mT)
        turned = _orthogonal(torch.stack(updates))
        for weight, update in zip(weights, turned, strict=True):
            weight.mul_(1 - lr * decay)
            size = 0.2 * max(weight.shape) ** 0.5
            weight.add_(update if update.shape == weight.shape else update.mT, alpha=-lr * size)

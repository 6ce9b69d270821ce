"""The weights that training starts from: a rough circuit that looks values up by names of several tokens.

From plain noise a small model first learns shortcuts and stays at them for millions of tokens.
With this sketch it finds about half of the codes of a short context, under names that it never
saw, before the first step. Training does the rest.

The stream of hidden states is divided into orthogonal parts: what the token itself is, and one
part for each of the six tokens before it. A direction that all tokens share is what heads find
distances by.

- Layer 1: each head looks a fixed number of places back, 1 to 4, by the fast angles of the rotary
  embedding, and copies the token there into the part of the stream for that distance.
- Layer 2: two heads look two places back and copy what that place saw 3 and 4 places before it.
- Layer 3: the heads look for first digits whose context is that of the asking place, and copy
  the digit. "The code of Anna is 4" and "Anna has the code 4" leave a name at two distances:
  two heads compare at the one, two at the other.
- Layer 4: two heads spell names; they look for a place that follows the same four tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from tools.embedded.network import Block, Network, Shape

BACK = 4
"""Distances that the first layer looks back, one a head."""
STRIDE = 2
"""How far back the second layer looks, and how many more tokens it sees by that."""
SEEN = 28
"""Dimensions of the stream for a token at one distance."""
TOKEN = 0.48
"""How long the token's part of an embedding is, and the direction that all share."""
FAST = range(10)
"""The fastest angles, by which heads find a distance."""
TURN = (0.75, 1.6)
"""The weight of those angles in the first and the second layer, whose stream is fuller."""
SEEN_WRITTEN = (0.06, 0.1)
"""The weight with which the first and the second layer write what they saw."""
MIDDLE = range(6, 14)
"""The angles by which a comparison prefers near places."""
SLOW = 14
"""The first of the slow angles, by which heads compare content at any distance."""
NOISE = 0.05
"""How much of the random start is left in the projections of attention."""
OLDER = 0.8
"""The weight of the newest token where a comparison has several."""
SCALE = 3.0
"""The factor of all that is written to the stream: single steps of training then change less of it."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a head compares, how sharply, and how much of what it finds it writes."""

    pairs: Sequence[tuple[Tensor, Tensor]]
    """The part of the asking place and the part of the place asked for, each [size, hidden]."""
    gain: float
    written: float
    near: float = 0.0
    """How much near places are preferred."""
    only: Tensor | None = None
    """Only places that have this direction [hidden] are looked at."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """Orthonormal rows that divide the stream."""

    shared: Tensor
    seen: Tensor
    """[BACK + STRIDE, SEEN, hidden]: the tokens 1, 2, ... places back"""
    token: Tensor


def _rows(count: int, size: int) -> Tensor:
    """Random orthonormal rows."""
    return torch.linalg.qr(torch.randn(size, count)).Q.T


def _divide(hidden: int) -> _Parts:
    """Divide the stream."""
    known = BACK + STRIDE
    shared, seen, token = _rows(hidden, hidden).split((1, known * SEEN, hidden - 1 - known * SEEN))
    return _Parts(shared[0], seen.view(known, SEEN, hidden), token)


def _wave(shape: Shape, back: int) -> Tensor:
    """A query along the fast angles that turns to what lies `back` places before."""
    half = shape.head_size // 2
    places = torch.tensor(FAST)
    turns = back * shape.rope_theta ** -(places * 2 / shape.head_size)
    wave = torch.zeros(shape.head_size)
    wave[places], wave[half + places] = torch.cos(turns), -torch.sin(turns)
    return wave


def _head(shape: Shape, head: int) -> slice:
    return slice(head * shape.head_size, (head + 1) * shape.head_size)


def _sketch_back(block: Block, parts: _Parts, read: Tensor) -> None:
    """Make each head copy the token that lies one place further back."""
    shape = block.shape
    for head in range(shape.heads):
        place = _head(shape, head)
        block.q.weight[place] += torch.outer(TURN[0] * _wave(shape, head + 1), parts.shared)
        block.o.weight[:, place][:, :SEEN] += SEEN_WRITTEN[0] * parts.seen[head].T
    for head in range(shape.kv_heads):
        place = _head(shape, head)
        block.k.weight[place] += torch.outer(TURN[0] * _wave(shape, 0), parts.shared)
        block.v.weight[place][:SEEN] += read


def _sketch_farther(block: Block, parts: _Parts) -> None:
    """Make the first heads look `STRIDE` places back and copy the farthest tokens that the first layer put there."""
    shape = block.shape
    block.k.weight[_head(shape, 0)] += torch.outer(TURN[1] * _wave(shape, 0), parts.shared)
    value, out = block.v.weight[_head(shape, 0)], torch.zeros(shape.hidden, shape.head_size)
    for index in range(STRIDE):
        rows = slice(index * SEEN, (index + 1) * SEEN)
        value[rows] += parts.seen[BACK - STRIDE + index]
        out[:, rows] = SEEN_WRITTEN[1] * parts.seen[BACK + index].T
    for head in range(shape.heads // shape.kv_heads):
        block.q.weight[_head(shape, head)] += torch.outer(TURN[1] * _wave(shape, STRIDE), parts.shared)
        block.o.weight[:, _head(shape, head)] += out


def _sketch_comparison(block: Block, parts: _Parts, kv_head: int, copies: Tensor, wanted: Comparison) -> None:
    """Make the heads of a key-value head find places whose parts match, and copy the token there."""
    shape = block.shape
    half = shape.head_size // 2
    slow = [*range(SLOW, half), *range(half + SLOW, shape.head_size)]
    query, key = torch.zeros(shape.head_size, shape.hidden), torch.zeros(shape.head_size, shape.hidden)
    for asking, asked in wanted.pairs:
        mix = _rows(SEEN, len(slow)).T
        query[slow] += wanted.gain * mix @ asking
        key[slow] += wanted.gain * mix @ asked
    if wanted.only is not None:
        query[half - 1] += 7.0 * parts.shared
        key[half - 1] += wanted.only
    middle = torch.zeros(shape.head_size)
    middle[list(MIDDLE)] = 1.0
    closeness = wanted.near * torch.outer(middle, parts.shared)
    group = shape.heads // shape.kv_heads
    for head in range(kv_head * group, (kv_head + 1) * group):
        block.q.weight[_head(shape, head)] += query + closeness
        block.o.weight[:, _head(shape, head)] += wanted.written * copies.T
    block.k.weight[_head(shape, kv_head)] += key + closeness
    block.v.weight[_head(shape, kv_head)] += copies


def _sketch_embedding(network: Network, parts: _Parts) -> Tensor:
    """Give each token a direction of its own and the shared one; the directions, [vocab, token part]."""
    tokens = functional.normalize(torch.randn(network.shape.vocab, parts.token.shape[0]))
    network.embed.weight.mul_(0.1).add_(TOKEN * (tokens @ parts.token + parts.shared))
    return tokens


@torch.no_grad()
def sketch_lookup(network: Network, tokenizer: Tokenizer) -> None:
    """Start the embedding and the four layers near the circuit."""
    shape = network.shape
    parts = _divide(shape.hidden)
    tokens = _sketch_embedding(network, parts)
    width = tokens.shape[1]
    read = (width / SEEN) ** 0.5 * _rows(SEEN, width) @ parts.token
    copies = _rows(shape.head_size, width) @ parts.token
    back, farther, find, spell = network.layers()
    for block in network.layers():
        for layer in (block.q, block.k, block.v, block.o):
            layer.weight.mul_(NOISE)
    _sketch_back(back, parts, read)
    _sketch_farther(farther, parts)
    now, (first, second, third, fourth, fifth, sixth) = OLDER * read, parts.seen.unbind()
    (space,) = tokenizer.encode(" ").ids
    after_space = functional.normalize(read @ (tokens[space] @ parts.token), dim=0) @ first
    short = ((second, third), (third, fourth), (fourth, fifth))
    long = ((second, fifth), (third, sixth))
    for kv_head, pairs in enumerate((short, long)):
        wanted = Comparison(pairs, gain=2.0, written=0.8, only=after_space)
        _sketch_comparison(find, parts, kv_head, copies, wanted)
    pairs = ((now, first), (first, second), (second, third), (third, fourth))
    _sketch_comparison(spell, parts, 1, copies, Comparison(pairs, gain=1.0, written=0.15, near=0.2))
    network.embed.weight.mul_(SCALE)
    network.norm.weight.div_(SCALE)
    for block in network.layers():
        block.o.weight.mul_(SCALE)
        block.down.weight.mul_(SCALE)

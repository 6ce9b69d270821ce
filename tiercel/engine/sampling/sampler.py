"""Sample tokens from logits, for rows with different parameters."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiercel.engine.native.library import NativeLibrary
from tiercel.engine.sampling.bad_words import BadWords
from tiercel.engine.sampling.filter import MassSearch, least_no_sync, limits_no_sync
from tiercel.engine.sampling.grammar import Grammar
from tiercel.engine.sampling.grammar_rows import Failures, GrammarRows, advance
from tiercel.engine.sampling.masks import Masks, can_draw_others, exclude_no_sync
from tiercel.engine.sampling.native import NativeDraw
from tiercel.engine.sampling.noise import gumbel_no_sync, noise_keys
from tiercel.engine.sampling.penalty import PenaltyCounts
from tiercel.engine.sampling.row import NO_FILTER, NO_IDS, Column, DrawColumn, Feature, RowTable
from tiercel.engine.sampling.sampled import Logprobs, Sampled
from tiercel.engine.sampling.subset import Subset
from tiercel.engine.sampling.upload import CopyLink, HostLink
from tiercel.values.clock import Clock, MonotonicClock
from tiercel.values.request import SamplingParams

log = logging.getLogger(__name__)

Ints = Sequence[int] | NDArray[np.integer]  # on the host
DrawKernel = Callable[..., tuple[Tensor, Tensor]]
"""Temperature, noise, maximum and check of a row in one pass; see `engine.kernels.sampling.draw_no_sync`. A kernel may
also apply filters and take masks; see `engine.sampling.native`."""

# Plain integers: operators of flags are slow.
_LOGPROBS, _PENALTY, _DRAW = int(Feature.LOGPROBS), int(Feature.PENALTY), int(Feature.DRAW)
_GRAMMAR = int(Feature.GRAMMAR)
_BAD_WORDS = int(Feature.BAD_WORDS)
_CHANGES = 0xFFFF & ~_LOGPROBS
_RESTRICTS = int(Feature.ALLOWED | Feature.BAD_WORDS)  # a grammar alone, with or without BAN, leaves some token
_FILTERS = Feature.MIN_P | Feature.TOP_P | Feature.TOP_K
_CHUNK_ELEMENTS_CPU = 1 << 17  # 0.5 MiB of float32, so that the temporaries of a chunk stay in the L2 cache
_CHUNK_ELEMENTS = 1 << 26  # 256 MiB: limits the memory and needs few launches


@dataclass(frozen=True, slots=True)
class DrawPlan:
    """The work of one call of the sampler on N rows, known on the host.

    Shapes: row_ids and positions [N] int64; features [N] uint16; changed [C] int64, indices of the rows that the kernel
            does not draw; draws [N, len(DrawColumn)] int32, the parameters for the kernel, None without one.
    """

    row_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    features: NDArray[np.uint16]
    wanted: int  # the features of all rows together
    changed: NDArray[np.int64]
    draws: NDArray[np.int32] | None


class Sampler:
    """Draws the next token of every row that a step samples.

    A sequence holds a row from admission until it finishes or is preempted. The host knows the parameters of each row
    and launches only the kernels that are needed: a greedy row is one maximum. The token of a row depends only on its
    logits, parameters and tokens, never on its number or on other rows.

    Both methods are called on the compute lane's thread, in the order of the plans. They never wait for the device,
    and a NaN in one row does not affect other rows.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        kernel: DrawKernel | None = None,
        search: MassSearch = least_no_sync,
        kernel_features: Feature = NO_FILTER,
        clock: Clock | None = None,
        link: HostLink | None = None,
    ) -> None:
        """`kernel`: one kernel for twenty operators of plain torch; `search`: finds the limits of top_p.

        `kernel_features`: what the kernel applies itself: the filters, all or none, and GRAMMAR if it takes masks.
        `link`: by default copies.
        """
        self._vocab_size = vocab_size
        self._device = device
        self._link = link or CopyLink(device)
        self._kernel = kernel
        self._search = search
        self._kernel_features = kernel_features
        # The features that change a row's token and are not applied by the kernel to raw logits.
        self._left_out = np.uint16(_CHANGES if kernel is None else _CHANGES & ~(_DRAW | int(kernel_features)))
        self._table = RowTable(max_rows, vocab_size)
        self._counts = PenaltyCounts(max_rows, vocab_size, device, self._link)
        self.grammars = GrammarRows(max_rows, vocab_size, clock or MonotonicClock())
        self._bad_words = BadWords(max_rows, vocab_size, device, self._link)

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        prompt: bytes,
        outputs: bytes,
        end_tokens: tuple[int, ...],
        grammar: Grammar | None = None,
    ) -> None:
        """Fill a row at admission or resume, or after a step was voided.

        `prompt` and `outputs` are raw uint32 token ids; `end_tokens` are banned, with the request's own stop
        tokens, until min_tokens were drawn. `grammar`: the compiled `params.grammar`; without it such a row fails.

        Cost:    host only, unless the row has penalties or bad words: then its tokens are counted or noted anew. With a
                 grammar, 2 us for each output token.
        Effects: the former content of the row is replaced for steps that are queued later.
        """
        self._table.set_row(row, params, end_tokens)
        if params.grammar:
            self.grammars.set_row(row, grammar, np.frombuffer(outputs, np.uint32))
        else:
            self.grammars.clear_row(row)
        if self._table.features[row] & Feature.PENALTY:
            self._counts.set_row_no_sync(row, np.frombuffer(prompt, np.uint32), np.frombuffer(outputs, np.uint32))
        if self._table.features[row] & Feature.BAD_WORDS:
            self._bad_words.set_row_no_sync(row, params.bad_words, np.frombuffer(outputs, np.uint32))

    def constrained(self, rows: Ints) -> NDArray[np.bool_]:
        """Return which of these rows have a grammar. Shapes: [N]."""
        return (self._table.features[np.asarray(rows, np.int64)] & _GRAMMAR) != 0

    def advance(self, rows: Ints, tokens: Tensor) -> Failures:
        """Give the rows that have a grammar the tokens that were drawn for them.

        Return the rows whose grammar has failed; their requests have to fail. Shapes: rows [N]; tokens [N] on the host.
        """
        row_ids = np.asarray(rows, np.int64)
        if not int(np.bitwise_or.reduce(self._table.features[row_ids])) & _GRAMMAR:
            return ()
        return advance(self.grammars.take(row_ids), tokens.tolist())

    def sample_no_sync(self, logits: Tensor, rows: Ints, positions: Ints, output_index: Ints) -> Sampled:
        """Draw one token for each row.

        The order: grammar, logit_bias, allowed_token_ids, bad_words, min_tokens, penalties, temperature, min_p, top_k,
        top_p, noise. Log-probabilities are those of the raw logits. A row with a grammar must have been given all its
        tokens (`advance`). Where its grammar or allowed_token_ids allow end tokens only, min_tokens does not ban them.

        Shapes:  logits [N, vocab] float, unchanged; rows [N], each at most once, in any order; others [N]: see `plan`.
        Cost:    one pass for every row; about 25 further passes for a row that draws; see benchmarks/sampler.py. With
                 the kernel one pass for every row, more only for rows with other parameters than a temperature.
        Effects: the drawn tokens are counted for the penalties of their rows, and noted for their bad words.
        """
        return self.draw_no_sync(logits, self.plan(rows, positions, output_index))

    def plan(self, rows: Ints, positions: Ints, output_index: Ints) -> DrawPlan:
        """Return what is to be done with these rows, from their parameters; nothing is queued.

        Shapes: rows [N]; positions [N]: tokens of the sequence before the new one; output_index [N]: output tokens
                before the new one.
        """
        row_ids, token_positions = np.asarray(rows, np.int64), np.asarray(positions, np.int64)
        features = self._table.features_at(row_ids, np.asarray(output_index, np.int64))
        wanted = int(np.bitwise_or.reduce(features))
        changed = np.flatnonzero(features & self._left_out) if wanted & int(self._left_out) else NO_IDS
        draws = None
        if self._kernel is not None and len(row_ids):
            draws = self._draws(row_ids, token_positions, wanted)
            if len(changed):
                draws[changed, DrawColumn.TEMPERATURE] = 0  # they are drawn once more
        return DrawPlan(row_ids, token_positions, features, wanted, changed, draws)

    def draw_no_sync(self, logits: Tensor, plan: DrawPlan, draws: Tensor | None = None) -> Sampled:
        """Draw the rows of a plan; see `sample_no_sync`. `draws`: those of the plan, if they are on the device already.

        Shapes: logits [N, vocab]; draws [N, len(DrawColumn)] int32.
        """
        row_ids, features, wanted, changed = plan.row_ids, plan.features, plan.wanted, plan.changed
        masks = self._masks(row_ids, features) if wanted & _GRAMMAR else None
        if self._kernel is None or plan.draws is None:
            largest, tokens = logits.max(dim=-1)
            bad_rows = (largest - largest) != 0  # 0 for finite numbers only; isfinite takes five kernels
        else:
            taken = (masks,) if masks is not None and self._kernel_features & Feature.GRAMMAR else ()
            on_device = self._link.send_no_sync(plan.draws) if draws is None else draws
            tokens, bad_rows = self._kernel(logits, on_device, *taken)
        is_empty = None
        if len(changed):
            changed = changed[np.argsort(features[changed], kind="stable")]  # sorted by features: fewer partial copies
            drawn, is_drawn_empty = self._draw_no_sync(logits, changed, row_ids, features, plan.positions, masks)
            places = self._link.send_no_sync(changed)
            tokens.index_copy_(0, places, drawn)
            if is_drawn_empty is not None:
                is_empty = torch.zeros_like(bad_rows).index_copy_(0, places, is_drawn_empty)
        if wanted & _PENALTY:
            penalised = Subset((features & _PENALTY) != 0, self._link)
            penalised_rows = self._link.send_no_sync(row_ids[penalised.host])
            self._counts.count_no_sync(penalised_rows, penalised.take(tokens))
        if wanted & _BAD_WORDS:
            some = Subset((features & _BAD_WORDS) != 0, self._link)
            self._bad_words.note_no_sync(self._link.send_no_sync(row_ids[some.host]), some.take(tokens))
        logprobs = self._logprobs_no_sync(logits, row_ids, features, tokens) if wanted & _LOGPROBS else None
        return Sampled(tokens, bad_rows, logprobs, is_empty)

    def _draw_no_sync(
        self,
        logits: Tensor,
        chosen: NDArray[np.int64],
        row_ids: NDArray[np.int64],
        features: NDArray[np.uint16],
        positions: NDArray[np.int64],
        masks: Masks | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens [C] of the chosen of N rows, and which rows could draw none; None if all could.

        Greedy rows come first in `chosen`.
        """
        budget = _CHUNK_ELEMENTS_CPU if self._device.type == "cpu" else _CHUNK_ELEMENTS
        length = max(1, budget // self._vocab_size)
        num_greedy = int(np.count_nonzero(features[chosen] < Feature.DRAW))
        tokens: list[Tensor] = []
        is_empty: list[Tensor] | None = [] if int(np.bitwise_or.reduce(features)) & _RESTRICTS else None
        for start, stop in ((0, num_greedy), (num_greedy, len(chosen))):
            for first in range(start, stop, length):
                ids = chosen[first : min(first + length, stop)]
                scores = logits.index_select(0, self._link.send_no_sync(ids)).float()
                words = None if masks is None else masks.lines(ids)
                scores = self._restrict_no_sync(scores, row_ids[ids], features[ids], words)
                if is_empty is not None:
                    is_empty.append(scores.amax(dim=-1) == -torch.inf)
                tokens.append(self._draw_chunk_no_sync(scores, row_ids[ids], features[ids], positions[ids]))
        return torch.cat(tokens), None if is_empty is None else torch.cat(is_empty)

    def _restrict_no_sync(
        self,
        scores: Tensor,
        row_ids: NDArray[np.int64],
        features: NDArray[np.uint16],
        words: NDArray[np.int32] | None,
    ) -> Tensor:
        """Return scores, with their bias, that are -inf for every token that a row may not draw.

        `words`: see `Masks.lines`.

        Shapes:  scores [M, vocab]; others [M].
        Effects: scores are overwritten.
        """
        wanted = int(np.bitwise_or.reduce(features))
        if words is not None and wanted & _GRAMMAR:
            features = self._exclude_no_sync(scores, words, row_ids, features)
        if wanted & Feature.BIAS:
            self._add_bias_no_sync(scores, row_ids)
        if wanted & Feature.ALLOWED:
            scores = self._keep_allowed_no_sync(scores, row_ids, features)
        if wanted & Feature.BAD_WORDS:
            places = np.flatnonzero(features & Feature.BAD_WORDS)
            self._bad_words.apply_no_sync(scores, places, row_ids[places])
        if wanted & Feature.BAN:
            self._ban_no_sync(scores, row_ids, features)
        return scores

    def _draw_chunk_no_sync(
        self, scores: Tensor, row_ids: NDArray[np.int64], features: NDArray[np.uint16], positions: NDArray[np.int64]
    ) -> Tensor:
        """Return the tokens [M] of rows that all draw or are all greedy.

        Shapes:  scores [M, vocab]; others [M].
        Effects: scores are overwritten.
        """
        wanted = int(np.bitwise_or.reduce(features))
        floats = self._link.send_no_sync(self._table.floats[row_ids])
        if wanted & Feature.PENALTY:
            some = Subset((features & Feature.PENALTY) != 0, self._link)
            ids = self._link.send_no_sync(row_ids[some.host])
            scores = some.put(scores, self._counts.apply_no_sync(some.take(scores), ids, some.take(floats)))
        draws = self._draws(row_ids, positions, wanted)
        if self._kernel is not None and self._kernel_features & _FILTERS:
            return self._kernel(scores, self._link.send_no_sync(draws))[0]
        if wanted & Feature.DRAW:
            scores.div_(floats[:, Column.TEMPERATURE, None])
            if wanted & _FILTERS:
                limits = limits_no_sync(scores, features, floats, self._table.top_ks[row_ids], self._search, self._link)
                scores.masked_fill_(scores < limits, -torch.inf)
        if self._kernel is not None:
            if wanted & Feature.DRAW:
                draws[:, DrawColumn.TEMPERATURE] = np.float32(1).view(np.int32)  # divided by it already
            return self._kernel(scores, self._link.send_no_sync(draws))[0]
        if wanted & Feature.DRAW:
            keys = self._link.send_no_sync(draws[:, : DrawColumn.TEMPERATURE])
            scores.add_(gumbel_no_sync(keys, self._vocab_size))
        return scores.max(dim=-1).indices  # takes the lowest of equal ids; faster than argmax on the CPU

    def _draws(self, row_ids: NDArray[np.int64], positions: NDArray[np.int64], wanted: int) -> NDArray[np.int32]:
        """Return the parameters of draws for the kernel. Rows that do not draw take their largest logit.

        `wanted`: the features of all these rows together.

        Shapes: row_ids and positions [M]; returns [M, len(DrawColumn)].
        """
        draws = self._table.draws[row_ids]
        if wanted & _DRAW:
            draws[:, : DrawColumn.TEMPERATURE] = noise_keys(self._table.seeds[row_ids], positions)
        return draws

    def _masks(self, row_ids: NDArray[np.int64], features: NDArray[np.uint16]) -> Masks:
        """Return what the grammars allow the rows that have one. Shapes: [N]."""
        places = np.flatnonzero(features & _GRAMMAR)
        place_of_row = np.full(len(row_ids), -1)
        place_of_row[places] = np.arange(len(places))
        return Masks(self.grammars.words(row_ids[places]), place_of_row)

    def _exclude_no_sync(
        self, scores: Tensor, words: NDArray[np.int32], row_ids: NDArray[np.int64], features: NDArray[np.uint16]
    ) -> NDArray[np.uint16]:
        """Apply the grammars. Return the features without BAN where it would leave nothing to draw.

        Shapes: scores [M, vocab], changed; words: see `Masks.lines`; others [M].
        """
        exclude_no_sync(scores, words, self._link)
        for index in np.flatnonzero((features & _GRAMMAR != 0) & (features & Feature.BAN != 0)).tolist():
            if not can_draw_others(words[index], self._table.banned[row_ids[index]]):
                features = features.copy()
                features[index] &= ~np.uint16(Feature.BAN)
        return features

    def _add_bias_no_sync(self, scores: Tensor, row_ids: NDArray[np.int64]) -> None:
        """Add logit_bias. Shapes: scores [M, vocab], changed; row_ids [M]."""
        ids = self._flat_ids([self._table.biased[row] for row in row_ids])
        biases = np.concatenate([self._table.biases[row] for row in row_ids])
        scores.view(-1).scatter_add_(0, ids, self._link.send_no_sync(biases))

    def _keep_allowed_no_sync(self, scores: Tensor, row_ids: NDArray[np.int64], features: NDArray[np.uint16]) -> Tensor:
        """Return scores without all but the allowed tokens. Shapes: scores [M, vocab]; others [M]."""
        some = Subset((features & Feature.ALLOWED) != 0, self._link)
        taken = some.take(scores)
        is_excluded = torch.ones_like(taken, dtype=torch.bool)
        ids = self._flat_ids([self._table.allowed[row] for row in row_ids[some.host]])
        is_excluded.view(-1).index_fill_(0, ids, False)
        return some.put(scores, taken.masked_fill(is_excluded, -torch.inf))

    def _ban_no_sync(self, scores: Tensor, row_ids: NDArray[np.int64], features: NDArray[np.uint16]) -> None:
        """Exclude tokens that would end a sequence too early. Shapes: scores [M, vocab], changed; others [M]."""
        banned = [
            self._table.banned[row] if row_features & Feature.BAN else NO_IDS
            for row, row_features in zip(row_ids, features, strict=True)
        ]
        scores.view(-1).index_fill_(0, self._flat_ids(banned), -torch.inf)

    def _flat_ids(self, ids_by_row: list[NDArray[np.int64]]) -> Tensor:
        """Return the indices of each row's token ids in a flat [M * vocab]."""
        starts = np.repeat(np.arange(len(ids_by_row)) * self._vocab_size, [len(ids) for ids in ids_by_row])
        return self._link.send_no_sync(starts + np.concatenate(ids_by_row))

    def _logprobs_no_sync(
        self, logits: Tensor, row_ids: NDArray[np.int64], features: NDArray[np.uint16], tokens: Tensor
    ) -> Logprobs:
        """Return the log-probabilities of the rows that requested them, at least one.

        Shapes: logits [N, vocab]; others [N].
        """
        some = Subset((features & _LOGPROBS) != 0, self._link)
        num_top = np.minimum(self._table.num_logprobs[row_ids[some.host]], self._vocab_size)
        raw = some.take(logits).float()
        whole = raw.logsumexp(dim=-1, keepdim=True)
        sampled = raw.gather(1, some.take(tokens)[:, None])
        top = raw.topk(int(num_top.max()), dim=-1)
        return Logprobs(
            indices=tuple(some.host.tolist()),
            num_top=tuple(num_top.tolist()),
            sampled=(sampled - whole).squeeze(1),
            ranks=(raw > sampled).sum(dim=-1) + 1,
            top_tokens=top.indices,
            top_logprobs=top.values - whole,
        )


def open_sampler(
    max_rows: int,
    vocab_size: int,
    device: torch.device,
    dtype: torch.dtype,
    library: NativeLibrary | None = None,
    link: HostLink | None = None,
) -> Sampler:
    """Open a sampler. On a GPU its kernels are compiled here, for logits of this dtype.

    `library`: the kernels of a CPU. `link`: see `Sampler`.
    """
    if device.type == "cpu" and library is not None:
        return Sampler(max_rows, vocab_size, device, NativeDraw(library), kernel_features=_FILTERS | Feature.GRAMMAR)
    if device.type != "cuda":
        return Sampler(max_rows, vocab_size, device, link=link)
    if find_spec("triton") is None:
        log.warning("sampler runs without kernels: no triton")
        return Sampler(max_rows, vocab_size, device, link=link)
    # lazy: CPU builds of torch come without Triton
    from tiercel.engine.kernels.sampling import draw_no_sync, search_no_sync

    scores = torch.zeros(1, vocab_size, device=device)
    greedy = torch.zeros(1, len(DrawColumn), dtype=torch.int32, device=device)
    draw_no_sync(scores.to(dtype), greedy)  # raw logits
    draw_no_sync(scores, greedy)  # changed scores
    search_no_sync(scores, scores[:, 0])
    return Sampler(max_rows, vocab_size, device, draw_no_sync, search_no_sync, link=link)

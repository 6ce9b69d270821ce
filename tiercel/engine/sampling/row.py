"""The sampling parameters of every row, as arrays on the host: a few numpy calls evaluate 256 rows."""

import enum
import math

import numpy as np
from numpy.typing import NDArray

from tiercel.values.request import SamplingParams

GREEDY_BELOW = 1e-5  # temperatures below this are greedy, as in vLLM, because dividing by them would overflow
NO_IDS: NDArray[np.int64] = np.empty(0, np.int64)


class Feature(enum.IntFlag):
    """The features of sampling that a row needs beyond its largest logit.

    Rows are sorted by this number, and DRAW is its highest bit.
    """

    LOGPROBS = 1
    BIAS = 2
    BAN = 4  # of end tokens, until min_tokens is reached
    PENALTY = 8
    BAD_WORDS = 16
    ALLOWED = 32  # of a list of tokens, no others
    MIN_P = 64
    TOP_P = 128
    TOP_K = 256
    GRAMMAR = 512
    DRAW = 1 << 15


NO_FILTER = Feature(0)


_BAN = int(Feature.BAN)  # a plain integer: operators of flags are slow


class Column(enum.IntEnum):
    """Columns of `RowTable.floats`."""

    TEMPERATURE = 0
    LOG_MIN_P = 1
    TOP_P = 2
    REPETITION = 3
    PRESENCE = 4
    FREQUENCY = 5


class DrawColumn(enum.IntEnum):
    """Columns of the parameters of a draw, 32 bits each: integers, or the bits of a float32 (see `Column`)."""

    KEY_1 = 0  # of the noise
    KEY_2 = 1
    TEMPERATURE = 2  # float; 0 takes the largest logit
    LOG_MIN_P = 3  # float, -inf = off
    TOP_P = 4  # float, inf = off
    TOP_K = 5  # the size of the vocabulary = off


class RowTable:
    """The sampling parameters of every row.

    Shapes: features [max_rows] uint16 (`Feature`), floats [max_rows, len(Column)] float32, seeds, top_ks, min_tokens
            and num_logprobs [max_rows] int64; draws [max_rows, len(DrawColumn)] int32, without keys: they depend on the
            position. A row that does not draw has temperature 0 there.
    """

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.features = np.zeros(max_rows, np.uint16)
        self.floats = np.zeros((max_rows, len(Column)), np.float32)
        self.draws = np.zeros((max_rows, len(DrawColumn)), np.int32)
        self.seeds = np.zeros(max_rows, np.int64)
        self.top_ks = np.ones(max_rows, np.int64)
        self.min_tokens = np.zeros(max_rows, np.int64)
        self.num_logprobs = np.zeros(max_rows, np.int64)
        self.banned = [NO_IDS] * max_rows  # token ids that are banned until min_tokens is reached
        self.biased = [NO_IDS] * max_rows  # token ids
        self.allowed = [NO_IDS] * max_rows  # token ids
        self.biases = [np.empty(0, np.float32)] * max_rows

    def set_row(self, row: int, params: SamplingParams, end_tokens: tuple[int, ...]) -> None:
        """Replace the parameters of a row."""
        self.features[row] = _features(params, self._vocab_size)
        self.floats[row] = (
            params.temperature,
            math.log(params.min_p) if params.min_p > 0 else -math.inf,
            params.top_p if params.top_p < 1 else math.inf,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        self.seeds[row] = params.seed
        self.top_ks[row] = min(params.top_k, self._vocab_size) if params.top_k > 0 else self._vocab_size
        self.draws[row, DrawColumn.TEMPERATURE : DrawColumn.TOP_K] = self.floats[row, : Column.TOP_P + 1].view(np.int32)
        self.draws[row, DrawColumn.TOP_K] = self.top_ks[row]
        if not self.features[row] & Feature.DRAW:
            self.draws[row, DrawColumn.TEMPERATURE] = 0
        self.min_tokens[row] = params.min_tokens
        self.num_logprobs[row] = params.logprobs or 0
        banned = np.array(sorted({*end_tokens, *params.stop_token_ids}), np.int64)
        self.banned[row] = banned[(banned >= 0) & (banned < self._vocab_size)]
        self.allowed[row] = np.array(params.allowed_token_ids, np.int64)
        if params.allowed_token_ids and not set(params.allowed_token_ids).difference(self.banned[row].tolist()):
            self.features[row] &= ~np.uint16(_BAN)  # it would leave nothing to draw
        self.biased[row] = np.array([token for token, _ in params.logit_bias], np.int64)
        self.biases[row] = np.array([bias for _, bias in params.logit_bias], np.float32)

    def features_at(self, rows: NDArray[np.int64], output_index: NDArray[np.int64]) -> NDArray[np.uint16]:
        """Return the features of rows at this step, without BAN if min_tokens is reached. Shapes: all [N]."""
        features = self.features[rows]
        if int(np.bitwise_or.reduce(features)) & _BAN:
            reached = output_index >= self.min_tokens[rows]
            features[reached] &= ~np.uint16(_BAN)
        return features


def _features(params: SamplingParams, vocab_size: int) -> Feature:
    """Return the features of one row; a greedy row needs no filters and no noise."""
    features = Feature(0)
    if params.logprobs is not None:
        features |= Feature.LOGPROBS
    if params.logit_bias:
        features |= Feature.BIAS
    if params.bad_words:
        features |= Feature.BAD_WORDS
    if params.allowed_token_ids:
        features |= Feature.ALLOWED
    if params.min_tokens > 0:
        features |= Feature.BAN
    if params.grammar:
        features |= Feature.GRAMMAR
    if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
        features |= Feature.PENALTY
    if params.temperature < GREEDY_BELOW:
        return features
    features |= Feature.DRAW
    if params.min_p > 0:
        features |= Feature.MIN_P
    if params.top_p < 1:
        features |= Feature.TOP_P
    if 0 < params.top_k < vocab_size:
        features |= Feature.TOP_K
    return features

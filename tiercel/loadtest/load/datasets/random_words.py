"""`random`: random words, lengths around a mean, and an optional prefix that all prompts share."""

from tiercel.loadtest.load.conversation import Conversation
from tiercel.loadtest.load.datasets.dataset import DatasetQuery, single, varied


def conversations(query: DatasetQuery) -> list[Conversation]:
    """Return prompts of random words."""
    lengths, ratio = query.settings.lengths(), query.settings.range_ratio
    rng, words = query.rng("lengths"), query.words()
    prefix = query.texts.text(lengths.prefix_len, query.words("prefix")) if lengths.prefix_len else ""
    found: list[Conversation] = []
    for _ in range(query.count):
        tokens = varied(lengths.input_len, ratio, rng)
        wanted = varied(lengths.output_len, ratio, rng)
        found.append(single(prefix + query.texts.text(tokens, words), lengths.prefix_len + tokens, wanted))
    return found

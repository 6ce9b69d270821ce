"""`random`: random words, lengths around a mean, and an optional prefix that all prompts share."""

from tiercel.loadtest.load.conversation import Conversation
from tiercel.loadtest.load.datasets.dataset import DatasetQuery, single, varied


def conversations(query: DatasetQuery) -> list[Conversation]:
    """Return prompts of random words."""
    settings = query.settings
    input_len, output_len = settings.input_len or 1024, settings.output_len or 128
    lengths, words = query.rng("lengths"), query.words()
    prefix = query.texts.text(settings.prefix_len, query.words("prefix")) if settings.prefix_len else ""
    found: list[Conversation] = []
    for _ in range(query.count):
        tokens = varied(input_len, settings.range_ratio, lengths)
        wanted = varied(output_len, settings.range_ratio, lengths)
        found.append(single(prefix + query.texts.text(tokens, words), settings.prefix_len + tokens, wanted))
    return found

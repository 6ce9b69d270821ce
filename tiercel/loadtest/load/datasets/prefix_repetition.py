"""`prefix_repetition`: a few long prefixes, each with many different endings."""

from tiercel.loadtest.load.conversation import Conversation
from tiercel.loadtest.load.datasets.dataset import DatasetQuery, single


def conversations(query: DatasetQuery) -> list[Conversation]:
    """Return prompts that use the prefixes equally often, in random order."""
    settings = query.settings
    words = query.words()
    lengths = settings.lengths()
    prefixes = [query.texts.text(lengths.prefix_len, words) for _ in range(settings.num_prefixes)]
    tokens = lengths.prefix_len + settings.suffix_len
    found = [
        single(
            prefixes[index % len(prefixes)] + query.texts.text(settings.suffix_len, words),
            tokens,
            lengths.output_len,
        )
        for index in range(query.count)
    ]
    query.rng("order").shuffle(found)
    return found

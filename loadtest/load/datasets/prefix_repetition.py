"""`prefix_repetition`: a few long prefixes, each asked with many endings of its own."""

from tiercel.loadtest.load.conversation import Conversation
from tiercel.loadtest.load.datasets.dataset import Order, single


def conversations(order: Order) -> list[Conversation]:
    settings = order.settings
    words = order.words()
    prefix_len = settings.prefix_len or 256
    prefixes = [order.texts.text(prefix_len, words) for _ in range(settings.num_prefixes)]
    tokens = prefix_len + settings.suffix_len
    found = [
        single(
            prefixes[index % len(prefixes)] + order.texts.text(settings.suffix_len, words),
            tokens,
            settings.output_len or 128,
        )
        for index in range(order.count)
    ]
    order.rng("order").shuffle(found)
    return found

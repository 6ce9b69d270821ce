"""`random`: words drawn at random, lengths around a mean, an optional prefix that all prompts share."""

from tiercel.loadtest.load.conversation import Conversation
from tiercel.loadtest.load.datasets.dataset import Order, single, varied


def conversations(order: Order) -> list[Conversation]:
    settings = order.settings
    input_len, output_len = settings.input_len or 1024, settings.output_len or 128
    lengths, words = order.rng("lengths"), order.words()
    prefix = order.texts.text(settings.prefix_len, order.words("prefix")) if settings.prefix_len else ""
    found: list[Conversation] = []
    for _ in range(order.count):
        tokens = varied(input_len, settings.range_ratio, lengths)
        wanted = varied(output_len, settings.range_ratio, lengths)
        found.append(single(prefix + order.texts.text(tokens, words), settings.prefix_len + tokens, wanted))
    return found

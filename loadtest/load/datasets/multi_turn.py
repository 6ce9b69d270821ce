"""`multi_turn`: conversations with think time; every turn is asked behind all that was said before."""

from tiercel.loadtest.load.conversation import Conversation, Turn
from tiercel.loadtest.load.datasets.dataset import Order, enough, varied
from tiercel.loadtest.load.datasets.sharegpt import recorded_texts


def conversations(order: Order) -> list[Conversation]:
    """Random words, or the questions of a ShareGPT file when a path is given.

    The number of turns and the lengths vary by `range_ratio`; pauses are exponential with mean `think_s`.
    """
    if order.settings.path is not None:
        return _recorded(order)
    settings = order.settings
    input_len, output_len = settings.input_len or 128, settings.output_len or 128
    lengths, words, pauses = order.rng("lengths"), order.words(), order.rng("pauses")
    found: list[Conversation] = []
    for _ in range(order.count):
        turns: list[Turn] = []
        for number in range(varied(settings.turns, settings.range_ratio, lengths)):
            tokens = varied(input_len, settings.range_ratio, lengths)
            prefix = order.texts.text(settings.prefix_len, words) if settings.prefix_len and not number else ""
            turns.append(
                Turn(
                    prefix + order.texts.text(tokens, words),
                    tokens + (settings.prefix_len if prefix else 0),
                    varied(output_len, settings.range_ratio, lengths),
                    _pause(number, settings.think_s, pauses.expovariate(1.0)),
                )
            )
        found.append(Conversation(tuple(turns)))
    return found


def _recorded(order: Order) -> list[Conversation]:
    settings, pauses = order.settings, order.rng("pauses")
    recorded = [texts for texts in recorded_texts(order) if len(texts) >= 4]
    order.rng("order").shuffle(recorded)
    found: list[Conversation] = []
    for texts in recorded[: order.count]:
        pairs = list(zip(texts[::2], texts[1::2], strict=False))[: settings.turns]
        found.append(
            Conversation(
                tuple(
                    Turn(
                        question,
                        order.texts.count(question),
                        settings.output_len or max(1, order.texts.count(answer)),
                        _pause(number, settings.think_s, pauses.expovariate(1.0)),
                    )
                    for number, (question, answer) in enumerate(pairs)
                )
            )
        )
    return enough(found, order)


def _pause(number: int, mean_s: float, drawn: float) -> float:
    return mean_s * drawn if number else 0.0

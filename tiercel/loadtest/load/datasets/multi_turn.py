"""`multi_turn`: conversations with think time, in which each turn follows the earlier questions and answers."""

from tiercel.loadtest.load.conversation import Conversation, Turn
from tiercel.loadtest.load.datasets.dataset import DatasetQuery, enough, varied
from tiercel.loadtest.load.datasets.sharegpt import recorded_texts


def conversations(query: DatasetQuery) -> list[Conversation]:
    """Return conversations of random words, or of the questions of a ShareGPT file if there is a path.

    The number of turns and the lengths vary by `range_ratio`; pauses are exponentially distributed with mean `think_s`.
    """
    if query.settings.path is not None:
        return _recorded(query)
    settings = query.settings
    lengths, ratio = settings.lengths(), settings.range_ratio
    rng, words, pauses = query.rng("lengths"), query.words(), query.rng("pauses")
    found: list[Conversation] = []
    for _ in range(query.count):
        turns: list[Turn] = []
        for number in range(varied(settings.turns, ratio, rng)):
            tokens = varied(lengths.input_len, ratio, rng)
            prefix_len = 0 if number else lengths.prefix_len
            prefix = query.texts.text(prefix_len, words) if prefix_len else ""
            turns.append(
                Turn(
                    prefix + query.texts.text(tokens, words),
                    tokens + prefix_len,
                    varied(lengths.output_len, ratio, rng),
                    _pause(number, settings.think_s, pauses.expovariate(1.0)),
                )
            )
        found.append(Conversation(tuple(turns)))
    return found


def _recorded(query: DatasetQuery) -> list[Conversation]:
    settings, pauses = query.settings, query.rng("pauses")
    recorded = [texts for texts in recorded_texts(query) if len(texts) >= 4]
    query.rng("order").shuffle(recorded)
    found: list[Conversation] = []
    for texts in recorded[: query.count]:
        pairs = list(zip(texts[::2], texts[1::2], strict=False))[: settings.turns]
        found.append(
            Conversation(
                tuple(
                    Turn(
                        question,
                        query.texts.count(question),
                        settings.output_len or max(1, query.texts.count(answer)),
                        _pause(number, settings.think_s, pauses.expovariate(1.0)),
                    )
                    for number, (question, answer) in enumerate(pairs)
                )
            )
        )
    return enough(found, query)


def _pause(number: int, mean_s: float, drawn: float) -> float:
    return mean_s * drawn if number else 0.0

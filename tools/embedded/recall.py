"""Recall chats: codes stated somewhere in a context, and questions that ask for them later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from string import ascii_lowercase
from typing import Final

from tools.embedded.chats import (
    TURN_TOKENS,
    Chat,
    Measure,
    Message,
    assistant,
    plain,
    rough_tokens,
    system,
    user,
)
from tools.embedded.prose import SYSTEMS, filler_sentence, question_and_answer
from tools.embedded.words import NAMES, SYLLABLES, THINGS

FACT_FORMS: tuple[str, ...] = (
    "The code of {name} is {code}.",
    "The code for {name} is {code}.",
    "{name} has the code {code}.",
    "The secret code of {name} is {code}.",
    "{name}'s code is {code}.",
)

QUESTION_FORMS: tuple[str, ...] = (
    "What is the code of {name}?",
    "Tell me the code of {name}.",
    "What code does {name} have?",
    "Which code does {name} have?",
    "What is the code for {name}?",
    "Please give me the code of {name}.",
    "Do you remember the code of {name}?",
    "And the code of {name}?",
    "What is the secret code of {name}?",
    "The code of {name}?",
    "What is {name}'s code?",
)

ANSWER_FORM = "The code of {name} is {code}."

REQUESTS: tuple[str, ...] = (
    "Please remember these codes.",
    "Here are some codes.",
    "Read this text.",
    "I will ask you about these codes later.",
    "Remember this.",
)

PROMISES: tuple[str, ...] = (
    "I will remember the codes.",
    "Thank you. Which code do you want to know?",
    "I have read it. Ask me about any code.",
)

LEADS: tuple[str, ...] = (
    "You are a helpful assistant.",
    "You know these codes.",
    "Answer questions about these codes.",
)


@dataclass(frozen=True, slots=True)
class Fact:
    """One name and its four-digit code."""

    name: str
    code: str

    def state(self, form: str = ANSWER_FORM) -> str:
        """The sentence that states the fact."""
        return form.format(name=self.name, code=self.code)


@dataclass(frozen=True, slots=True)
class RecallStyle:
    """How varied a recall chat is; the defaults are the plainest kind."""

    paraphrase: float = 0.0
    """The share of chats that use other phrasings than the canonical one."""
    filler: float = 0.0
    """The largest share of prose sentences between the facts."""
    placement: float = 0.0
    """The share of chats that put the facts into a system message or an earlier turn."""
    made_up: float = 0.0
    """The share of chats whose names include made-up words of several tokens."""
    known: float = 0.5
    """The largest share of names of the list in a chat with made-up names."""
    letters: float = 0.6
    """The share of made-up names that are drawn letter by letter; others can be pronounced."""
    narrow: float = 0.0
    """The share of names of letters that are drawn from three letters only, so that pairs of letters come again."""
    alike: float = 0.1
    """The share of made-up names that differ from another name of the chat in one letter or part."""
    casual: float = 0.0
    """The share of questions without a capital at the start or a mark at the end."""
    listed: float = 0.5
    """The share of chats that ask for many codes in one question."""
    drill: float = 0.0
    """The share of chats that are bare drills of looking up a value by its name."""
    asked: float = 0.5
    """The share of the context that questions and answers may fill."""


FULL_STYLE = RecallStyle(paraphrase=0.6, filler=0.7, placement=0.5, made_up=0.15, listed=0.3)
"""The style of the finished model's last stage of training, and of its evaluation."""


def random_code(rng: Random) -> str:
    """A code of four digits."""
    return f"{rng.randrange(10000):04d}"


SHORTEST_NAME: Final = 3
LONGEST_NAME: Final = 9
"""Letters of a made-up name."""


def letter_name(rng: Random, letters: Sequence[str] = ascii_lowercase) -> str:
    """A name of random letters that is not in the list of names."""
    while True:
        size = rng.randint(SHORTEST_NAME, LONGEST_NAME)
        name = "".join(rng.choice(letters) for _ in range(size)).capitalize()
        if name not in NAMES:
            return name


def spoken_name(rng: Random) -> str:
    """A name that can be pronounced, of syllables or of consonants and vowels in turn."""
    while True:
        if rng.random() < 0.4:
            name = "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3)))
        else:
            kinds = ("bcdfghjklmnprstvwyz", "aeiou")
            turn = rng.randrange(2)
            size = rng.randint(SHORTEST_NAME, LONGEST_NAME)
            name = "".join(rng.choice(kinds[(turn + place) % 2]) for place in range(size))
        if name.capitalize() not in NAMES:
            return name.capitalize()


def _similar_name(rng: Random, name: str) -> str:
    """A name that differs from another one in one letter, or in the letters after its first or before its last."""
    other = rng.choice((letter_name, spoken_name))(rng).lower()
    kind, half = rng.randrange(3), len(name) // 2
    if kind == 0:
        place = rng.randrange(len(name))
        name = name[:place] + rng.choice(ascii_lowercase) + name[place + 1 :]
    elif kind == 1:
        name = name[: half + 1] + other
    else:
        name = other + name[half:]
    return name[:LONGEST_NAME].capitalize()


def made_up_name(rng: Random, style: RecallStyle = RecallStyle()) -> str:
    """A name that is in no list, of several tokens."""
    if rng.random() >= style.letters:
        return spoken_name(rng)
    if style.narrow and rng.random() < style.narrow:
        return letter_name(rng, rng.sample(ascii_lowercase, 3))
    return letter_name(rng)


def draw_names(rng: Random, count: int, style: RecallStyle) -> list[str]:
    """At most `count` distinct names, as the style wants them."""
    if rng.random() >= style.made_up:
        return rng.sample(NAMES, min(count, len(NAMES)))
    known = min(int(count * style.known * rng.random()), len(NAMES))
    names = rng.sample(NAMES, known)
    invented: list[str] = []
    for _ in range(max(1, count - known)):
        if invented and rng.random() < style.alike:
            invented.append(_similar_name(rng, rng.choice(invented)))
        else:
            invented.append(made_up_name(rng, style))
    names = list(dict.fromkeys(names + invented))
    rng.shuffle(names)
    return names


def state_facts(
    rng: Random,
    budget: int,
    style: RecallStyle = FULL_STYLE,
    measure: Measure = rough_tokens,
) -> tuple[str, list[Fact]]:
    """Text of at most `budget` tokens that states facts, and the facts in their order.

    A name is stated once, so each question has one answer. A budget too small for one
    fact still gets one.
    """
    names = draw_names(rng, max(1, budget // 10), style)
    share = rng.random() * style.filler
    forms = FACT_FORMS if rng.random() < style.paraphrase else FACT_FORMS[:1]
    mixed = rng.random() < 0.5
    form = rng.choice(forms)
    sentences: list[str] = []
    facts: list[Fact] = []
    used = 0
    while names:
        if facts and rng.random() < share:
            sentence, fact = filler_sentence(rng), None
        else:
            fact = Fact(names.pop(), random_code(rng))
            sentence = fact.state(rng.choice(forms) if mixed else form)
        used += measure(" " + sentence)
        if facts and used > budget:
            break
        sentences.append(sentence)
        if fact is not None:
            facts.append(fact)
    if style.filler:
        while (used := used + measure(" " + (sentence := filler_sentence(rng)))) < budget:
            sentences.insert(rng.randrange(len(sentences) + 1), sentence)
    return " ".join(sentences), facts


def join_names(names: Sequence[str]) -> str:
    """An English list: "Anna, Bert and Carl"."""
    if len(names) == 1:
        return names[0]
    return ", ".join(names[:-1]) + " and " + names[-1]


def _ask(rng: Random, fact: Fact, style: RecallStyle) -> str:
    """A question for one code."""
    varied = rng.random() < style.paraphrase
    form = rng.choice(QUESTION_FORMS) if varied else QUESTION_FORMS[0]
    if rng.random() < style.casual:
        form = form[0].lower() + form[1:] if form[0].isalpha() and rng.random() < 0.7 else form
        form = form if rng.random() < 0.5 else form.rstrip("?.")
    return form.format(name=fact.name)


def _rounds(
    rng: Random,
    facts: Sequence[Fact],
    budget: int,
    style: RecallStyle,
    measure: Measure,
) -> list[tuple[str, str]]:
    """Questions with their answers, within about `budget` tokens; at least one."""
    rounds: list[tuple[str, str]] = []
    listed = rng.random() < style.listed
    order = rng.sample(facts, len(facts))
    while order and (budget > 0 or not rounds):
        if listed and len(order) > 1 and budget > 50:
            count = max(2, min(len(order), budget // 15, rng.randint(2, 12)))
            group, order = order[:count], order[count:]
            question = f"What are the codes of {join_names([fact.name for fact in group])}?"
            answer = " ".join(fact.state() for fact in group)
        else:
            fact = order.pop()
            question, answer = _ask(rng, fact, style), fact.state()
        rounds.append((question, answer))
        budget -= measure(question) + measure(answer) + 2 * TURN_TOKENS
    return rounds


def _small_talk(rng: Random) -> list[Message]:
    """A short exchange about something else."""
    while True:
        question, answer = question_and_answer(rng)
        if rough_tokens(question) + rough_tokens(answer) < 40:
            return [user(question), assistant(answer)]


def _with_text(rng: Random, text: str, rounds: list[tuple[str, str]], placed: bool) -> Chat:
    """Put the text that states the facts into a chat with the rounds of questions."""
    opening: list[Message]
    first, rest = rounds[0], rounds[1:]
    kind = rng.choice(("system", "earlier", "request", "after")) if placed else "plain"
    if kind == "system":
        opening = [system(f"{rng.choice(LEADS)} {text}"), user(first[0])]
    elif kind == "earlier":
        opening = [
            user(text if rng.random() < 0.3 else f"{rng.choice(REQUESTS)} {text}"),
            assistant(rng.choice(PROMISES)),
            user(first[0]),
        ]
    elif kind == "request":
        opening = [user(f"{rng.choice(REQUESTS)} {text} {first[0]}")]
    elif kind == "after":
        opening = [user(f"{text}\n\n{first[0]}")]
    else:
        opening = [user(f"{text} {first[0]}")]
    if opening[0].role != "system" and placed and rng.random() < 0.4:
        opening.insert(0, system(rng.choice(SYSTEMS)))
    if len(opening) > 1 and placed and rng.random() < 0.3:
        opening[-1:-1] = _small_talk(rng)
    messages = [*opening, assistant(first[1])]
    for question, answer in rest:
        if placed and rng.random() < 0.1:
            messages += _small_talk(rng)
        messages += [user(question), assistant(answer)]
    return tuple(messages)


DRILL_FORMS: tuple[str, ...] = (
    "{name} {value}",
    "{name} {value}",
    "{name} is {value}.",
    "The code of {name} is {value}.",
)


def drill_chat(
    rng: Random,
    tokens: int,
    style: RecallStyle = RecallStyle(),
    measure: Measure = rough_tokens,
) -> Chat:
    """Names with short values, and then the same in another order.

    A value of one digit can only be found by its name. (The later digits of a long code can
    also be found by the digits before them, which a young model learns first, and stays at.)
    """
    form = rng.choice(DRILL_FORMS)
    words = rng.random() < 0.3
    size = rough_tokens(form) + (0 if words else 1)
    names = draw_names(rng, max(2, tokens // (2 * size)), style)
    lines: list[str] = []
    left = tokens // 2
    for name in names:
        value = rng.choice(THINGS) if words else str(rng.randrange(10))
        lines.append(form.format(name=name, value=value))
        left -= measure(" " + lines[-1])
        if left < 0 and len(lines) > 2:
            lines.pop()
            break
    first = " ".join(lines)
    rng.shuffle(lines)
    return user(first), assistant(" ".join(lines))


def recall_chat(
    rng: Random,
    tokens: int,
    style: RecallStyle = FULL_STYLE,
    measure: Measure = rough_tokens,
) -> Chat:
    """A chat of about `tokens` tokens whose last part asks for codes stated before it."""
    if rng.random() < style.drill:
        return drill_chat(rng, tokens, style, measure)
    # A short context needs many questions to teach much; a long one also comes with few.
    least = 0.3 if tokens < 800 else 0.03
    asked = max(30, int(tokens * style.asked * (least + (1 - least) * rng.random())))
    text, facts = state_facts(rng, max(12, tokens - asked - 12), style, measure)
    rounds = _rounds(rng, facts, asked, style, measure)
    return _with_text(rng, text, rounds, rng.random() < style.placement)


def recall_text(rng: Random, tokens: int, style: RecallStyle = FULL_STYLE) -> Chat:
    """Plain text outside any chat that states codes and then states them again."""
    text, facts = state_facts(rng, max(12, tokens // 2 - TURN_TOKENS), style)
    again = rng.sample(facts, min(len(facts), max(1, tokens // 25)))
    return (plain(" ".join((text, *(fact.state() for fact in again)))),)


def recall_question(
    rng: Random,
    tokens: int,
    style: RecallStyle = FULL_STYLE,
    measure: Measure = rough_tokens,
) -> tuple[Chat, Fact]:
    """A chat of about `tokens` tokens that ends in one question, and the fact it asks for."""
    text, facts = state_facts(rng, max(12, tokens - 30), style, measure)
    fact = rng.choice(facts)
    chat = _with_text(rng, text, [(_ask(rng, fact, style), "")], rng.random() < style.placement)
    return chat[:-1], fact

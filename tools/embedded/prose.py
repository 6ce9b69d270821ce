"""Prose of the grammar: sentences, tiny stories, sums, and short questions with answers."""

# ruff: noqa: SIM905 - word lists read better as text

from __future__ import annotations

from random import Random
from string import ascii_lowercase

from tools.embedded.chats import (
    TURN_TOKENS,
    Chat,
    assistant,
    chat_tokens,
    plain,
    rough_tokens,
    system,
    user,
)
from tools.embedded.small_talk import TALK
from tools.embedded.strange import FOREIGN, ODD_FORMS, SMALL_WORDS, TOPICS
from tools.embedded.words import (
    ADJECTIVES,
    ANIMALS,
    CAPITALS,
    COLOUR_OF,
    COLOURS,
    DAYS,
    MEANINGS,
    MONTHS,
    NAMES,
    OPPOSITES,
    PLACES,
    SOUNDS,
    SYLLABLES,
    THINGS,
    WEATHER,
)

Pair = tuple[str, str]
"""A question and its answer."""

NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
).split()

UNKNOWN = (
    "I am a small model and I do not know that.",
    "I am sorry, that is more than I know. I am a small model.",
    "I do not know that. You can ask me about codes, colours, animals or small sums.",
)

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful, friendly assistant.",
    "You are tiercel.",
    "Answer in short sentences.",
    "Be kind and brief.",
)


def filler_sentence(rng: Random) -> str:
    """A plain sentence that states no code."""
    name, place, thing = rng.choice(NAMES), rng.choice(PLACES), rng.choice(THINGS)
    animal, colour = rng.choice(ANIMALS), rng.choice(COLOURS)
    return rng.choice(
        (
            f"It was a {rng.choice(WEATHER)} day in {rng.choice(MONTHS)}.",
            f"The {animal} slept in the {place}.",
            f"{name} walked to the {place}.",
            f"{name} has a {colour} {thing}.",
            f"The {thing} in the {place} is {colour}.",
            f"We saw {with_article(rng.choice(ADJECTIVES))} {animal} near the {place}.",
            f"On {rng.choice(DAYS)} we go to the {place}.",
            f"{name} likes the {animal} very much.",
            f"There are {rng.choice(NUMBERS[2:])} trees behind the {place}.",
            f"The {place} was quiet that night.",
            f"{name} found a {thing} by the {place} and took it home.",
            "The wind was soft and the sky was clear.",
        )
    )


def with_article(words: str) -> str:
    """The words after "a" or "an"."""
    return ("an " if words[0] in "aeiou" else "a ") + words


def _story_end(rng: Random, name: str, thing: str) -> str:
    """The last sentences of a story."""
    other = rng.choice(NAMES)
    return rng.choice(
        (
            f"{name} said thank you and went home. From that day on they were friends.",
            f"At last they found the {thing} under a tree. Everyone was happy.",
            f"{name} gave the {thing} to {other}, and {other} smiled.",
            f"When night came, {name} put the {thing} by the bed and slept well.",
            f"{other} laughed and said: you are very kind. The end.",
        )
    )


def story(rng: Random, animal: str | None = None) -> str:
    """A tiny story of three to six sentences with one animal, one person and one thing."""
    name, place, thing = rng.choice(NAMES), rng.choice(PLACES), rng.choice(THINGS)
    animal = animal or rng.choice(ANIMALS)
    kind, colour = with_article(rng.choice(ADJECTIVES)), rng.choice(COLOURS)
    start = rng.choice(("Once upon a time", "One day", f"One {rng.choice(WEATHER)} morning"))
    begin = rng.choice(
        (
            f"{start} there was {kind} {animal} who lived near the {place}.",
            f"{start} {name} met {kind} {animal} near the {place}.",
        )
    )
    middle = rng.choice(
        (
            f"The {animal} had lost a {colour} {thing}. {name} wanted to help.",
            f"The {animal} carried a {colour} {thing}. {name} asked: where did you find it?",
            f"The {animal} was cold. {name} came with a {colour} {thing} and some bread.",
            f"{name} had a {colour} {thing}, and the {animal} liked it very much.",
        )
    )
    return f"{begin} {middle} {_story_end(rng, name, thing)}"


SUM_FORMS = (
    *("What is {}?", "What's {}?", "How much is {}?", "What does {} make?", "Do you know what {} is?"),
    *("{}", "{}?", "{}.", "{} =", "{} = ?", "{}=", "{}=?", "{} is?", "{} equals?", "{} equals what?"),
    *("Calculate {}.", "Compute {}.", "Solve {}.", "Please work out {}.", "Tell me {}.", "Can you add {}?"),
    *("And {}?", "What is the result of {}?", "Answer this: {}", "Sum: {}", "Can you tell me what {} is?"),
)
"""Ways to ask for the value of an expression."""

SMALL_SUM = 20
"""Sums up to here are a quarter of all exchanges about numbers, so that every one is learned by heart."""


def _expression(rng: Random, a: int, sign: str, word: str, b: int) -> str:
    """An expression as people type it, with and without spaces, with a sign or a word."""
    forms = (f"{a} {sign} {b}", f"{a}{sign}{b}", f"{a} {word} {b}")
    return rng.choice(forms) if rng.random() < 0.95 else rng.choice((f"{a} {sign}{b}", f"{a}{sign} {b}"))


def _small_sum(rng: Random) -> Pair:
    """A sum of two numbers whose result is at most `SMALL_SUM`."""
    a = rng.randint(0, SMALL_SUM)
    b = rng.randint(0, SMALL_SUM - a)
    if rng.random() < 0.5:
        a, b = b, a
    if rng.random() < 0.1:
        form = rng.choice(("Add {} and {}.", "What is the sum of {} and {}?", "Add {} to {}."))
        question = form.format(a, b)
    else:
        question = rng.choice(SUM_FORMS).format(_expression(rng, a, "+", "plus", b))
    return question, f"{a} plus {b} is {a + b}."


def _sum(rng: Random) -> Pair:
    """A small sum, difference or product, with a full-sentence answer."""
    if rng.random() < 0.5:
        return _small_sum(rng)
    kind = rng.choice("+-*")
    if kind == "*":
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        word, result = "times", a * b
    elif kind == "-":
        a = rng.randint(0, 50)
        b = rng.randint(0, a)
        word, result = "minus", a - b
    else:
        a, b = rng.randint(0, 50), rng.randint(0, 50)
        word, result = "plus", a + b
    question = rng.choice(SUM_FORMS).format(_expression(rng, a, kind, word, b))
    return question, f"{a} {word} {b} is {result}."


def _series(first: int, last: int) -> str:
    """The numbers from first to last, as a sentence."""
    return ", ".join(map(str, range(first, last + 1))) + "."


def _count(rng: Random) -> Pair:
    """Counting up, or the number after another."""
    first = rng.randint(1, 20)
    if rng.random() < 0.4:
        return f"What number comes after {first}?", f"The number after {first} is {first + 1}."
    if rng.random() < 0.3:
        first = 1
    last = first + rng.randint(2, 9)
    if rng.random() < 0.2:
        last = rng.choice((20, 30, 50, 100, 1000))
        ask = rng.choice((f"Count to {last}.", f"Count from 1 to {last}.", f"Can you count to {last}?"))
        return ask, f"1, 2, 3, 4, 5 and so on, up to {last}."
    if first == 1 and rng.random() < 0.5:
        return rng.choice(("Count to {}.", "Can you count to {}?", "Please count to {}.")).format(last), _series(
            1, last
        )
    return f"Count from {first} to {last}.", _series(first, last)


def _world(rng: Random) -> Pair:
    """A question about capitals, colours, sounds, opposites, days, months or meanings."""
    country, thing = rng.choice(list(CAPITALS)), rng.choice(list(COLOUR_OF))
    animal, (left, right) = rng.choice(list(SOUNDS)), rng.choice(OPPOSITES)
    if rng.random() < 0.5:
        left, right = right, left
    day, month = rng.randrange(7), rng.randrange(12)
    meaning = rng.choice(list(MEANINGS))
    after = f"{DAYS[(day + 1) % 7]} comes after {DAYS[day]}."
    return rng.choice(
        (
            (f"What is the capital of {country}?", _capital(country)),
            (f"Which city is the capital of {country}?", _capital(country)),
            (f"{country}'s capital?", _capital(country)),
            (f"What is {country}'s capital?", _capital(country)),
            (f"Capital of {country}?", _capital(country)),
            (f"Tell me the capital of {country}.", _capital(country)),
            (f"Do you know the capital of {country}?", _capital(country)),
            (f"Where is {CAPITALS[country]}?", f"{CAPITALS[country]} is in {country}."),
            (f"What colour is {thing}?", f"{_first_upper(thing)} is {COLOUR_OF[thing]}."),
            (f"What color is {thing}?", f"{_first_upper(thing)} is {COLOUR_OF[thing]}."),
            (f"Which colour does {thing} have?", f"{_first_upper(thing)} is {COLOUR_OF[thing]}."),
            (f"What does the {animal} say?", f"The {animal} says {SOUNDS[animal]}."),
            (f"What sound does a {animal} make?", f"The {animal} says {SOUNDS[animal]}."),
            (f"What is the opposite of {left}?", f"The opposite of {left} is {right}."),
            (f"Opposite of {left}?", f"The opposite of {left} is {right}."),
            (f"What's the opposite of {left}?", f"The opposite of {left} is {right}."),
            (f"Tell me the opposite of {left}.", f"The opposite of {left} is {right}."),
            (f"What day comes after {DAYS[day]}?", after),
            (f"Which day is after {DAYS[day]}?", after),
            (f"Which month comes after {MONTHS[month]}?", _next_month(month)),
            (f"What is {meaning}?", MEANINGS[meaning]),
            (f"Tell me about {meaning}.", MEANINGS[meaning]),
        )
    )


def _capital(country: str) -> str:
    return f"The capital of {country} is {CAPITALS[country]}."


def _next_month(month: int) -> str:
    return f"{MONTHS[(month + 1) % 12]} comes after {MONTHS[month]}."


def _first_upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _copy(rng: Random) -> Pair:
    """An order to repeat or to make a list or JSON from words in the question."""
    words = rng.sample((*ANIMALS, *COLOURS, *THINGS), rng.randint(2, 5))
    name, age = rng.choice(NAMES), rng.randint(2, 90)
    line = " ".join(words)
    return rng.choice(
        (
            (f"Repeat: {line}", line),
            (f"Say {line}.", f"{_first_upper(line)}."),
            (f"Repeat after me: {filler_sentence(rng)}", ""),
            (f"Make a list of {', '.join(words)}.", "\n".join(f"- {word}" for word in words)),
            (
                f"{name} is {age} years old. Write this as JSON.",
                f'{{"name": "{name}", "age": {age}}}',
            ),
            (f"{name} is {age} years old. How old is {name}?", f"{name} is {age} years old."),
            (f"My name is {name}.", f"Hello {name}. It is nice to meet you."),
            (f"I am {name}.", f"Hello {name}. It is nice to meet you."),
            (f"Say {words[0]}.", f"{_first_upper(words[0])}."),
            (f"Say hello to {name}.", f"Hello {name}!"),
        )
    )


def _tell(rng: Random) -> Pair:
    """A request for a story."""
    if rng.random() < 0.5:
        animal = rng.choice(ANIMALS)
        ask = rng.choice(("Tell me a story about {}.", "Write a story about {}."))
        return ask.format(with_article(animal)), story(rng, animal)
    asks = ("Tell me a story.", "Write a short story.", "Tell me another story.", "A story, please.")
    return rng.choice(asks), story(rng)


def _strange(rng: Random) -> Pair:
    """A question beyond the grammar, made of known words, and a polite refusal."""
    animal, place, thing = rng.choice(ANIMALS), rng.choice(PLACES), rng.choice(THINGS)
    colour, country = rng.choice(COLOURS), rng.choice(list(CAPITALS))
    question = rng.choice(
        (
            f"Why is the {animal} {colour}?",
            f"Why is the {place} so {rng.choice(WEATHER)}?",
            f"Can you build a {thing}?",
            f"How many people live in {country}?",
            f"Who is the king of {country}?",
            f"Write a poem about the {thing} and the {animal}.",
            f"Explain how a {thing} is made.",
            f"Write a program that draws a {thing}.",
            f"What is the best {place} in {country}?",
            f"Translate the word {thing}.",
            f"How far is it from {CAPITALS[country]} to the {place}?",
            f"Who was the first {animal} in the {place}?",
        )
    )
    return question, rng.choice(UNKNOWN)


def _letters(rng: Random, size: int) -> str:
    """Random small letters."""
    return "".join(rng.choice(ascii_lowercase) for _ in range(size))


def _odd(rng: Random) -> Pair:
    """A question beyond the grammar, made of unknown words, and a polite refusal."""
    if rng.random() < 0.4:
        words = [
            "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 4)))
            if rng.random() < 0.6
            else _letters(rng, rng.randint(1, 9))
            for _ in range(rng.randint(1, 8))
        ]
    else:
        words = rng.sample(TOPICS, rng.randint(1, 5))
        if rng.random() < 0.5:
            words = [part for word in words for part in (rng.choice(SMALL_WORDS), word)]
    subject = " ".join(words)
    roll = rng.random()
    if roll < 0.1:
        return rng.choice(FOREIGN), rng.choice(UNKNOWN)
    if roll < 0.15:
        signs = "".join(rng.choice("!?.,;:()[]{}<>#$%&*/+-=@^_~|") for _ in range(rng.randint(1, 8)))
        return rng.choice((signs, f"{subject} {signs}")), rng.choice(UNKNOWN)
    return rng.choice(ODD_FORMS).format(subject), rng.choice(UNKNOWN)


def _talk(rng: Random) -> Pair:
    """A polite exchange from the table of small talk."""
    questions, answers = rng.choice(TALK)
    return rng.choice(questions), rng.choice(answers)


def _casual(rng: Random, question: str) -> str:
    """The question as somebody in a hurry types it: other case, punctuation, a greeting."""
    roll = rng.random()
    if roll < 0.3:
        question = question.lower()
    elif roll < 0.35:
        question = question.upper()
    roll = rng.random()
    if roll < 0.4:
        question = question.rstrip(".?!")
    elif roll < 0.5:
        question = question.rstrip(".?!") + rng.choice(("??", "!", " ?", "...", ".", "?", " please", ", please."))
    if rng.random() < 0.1:
        question = rng.choice(("Hi, ", "Hello! ", "Hey, ", "hi ", "Please, ", "OK. ", "So ", "Hello, ")) + question
    return question


COPIES = (_copy, _tell)
"""Kinds whose answers repeat words of the question, which therefore stays as it is."""


def question_and_answer(rng: Random) -> Pair:
    """One short exchange of any kind."""
    kinds = (_sum, _sum, _sum, _count, _world, _world, _world, _copy, _tell, _odd, _odd, _strange, _talk, _talk, _talk)
    write = rng.choice(kinds)
    question, answer = write(rng)
    answer = answer or question.partition(": ")[2]
    if write not in COPIES and rng.random() < 0.4:
        question = _casual(rng, question) or question
    return question, answer


def plain_text(rng: Random, tokens: int) -> Chat:
    """Stories or plain sentences outside any chat, at most about `tokens` tokens."""
    write = rng.choice((story, filler_sentence))
    text = write(rng)
    while rough_tokens(longer := f"{text} {write(rng)}") < tokens - TURN_TOKENS:
        text = longer
    return (plain(text),)


def sums_chat(rng: Random, tokens: int) -> Chat:
    """A chat of at most about `tokens` tokens (one exchange at least) of nothing but sums."""
    chat: Chat = ()
    while True:
        question, answer = _small_sum(rng) if rng.random() < 0.7 else _sum(rng)
        if rng.random() < 0.3:
            question = _casual(rng, question)
        longer = (*chat, user(question), assistant(answer))
        if chat and chat_tokens(longer) > tokens:
            return chat
        chat = longer


def prose_chat(rng: Random, tokens: int) -> Chat:
    """A chat of at most about `tokens` tokens (one exchange at least) on mixed topics."""
    chat: Chat = (system(rng.choice(SYSTEMS)),) if rng.random() < 0.3 else ()
    while True:
        question, answer = question_and_answer(rng)
        longer = (*chat, user(question), assistant(answer))
        if chat_tokens(chat) and any(turn.role == "user" for turn in chat):
            if chat_tokens(longer) > tokens:
                return chat
        elif chat_tokens(longer) > tokens > 150:
            continue
        chat = longer

"""The closed word lists that the grammar draws from.

Every name here becomes one token (see `embedded.tokenizer`), which makes a fact a short,
rigid token pattern that a small model can copy exactly.
"""

# ruff: noqa: SIM905 - word lists read better as text

from __future__ import annotations

from typing import Final

NAMES: Final[tuple[str, ...]] = tuple(
    """
    Ada Adam Alex Alice Alma Amir Amy Ana Andrea Andrew Anna Anton Arthur Axel Barbara
    Beatrice Ben Bella Bert Beth Bianca Bill Boris Brian Bruno Carl Carla Carmen Carol Celia
    Chloe Clara Claude Cleo Cora Daisy Dana Daniel David Dean Della Diana Dina Dora Doris
    Duncan Dylan Edith Edwin Eli Elias Elisa Ella Elsa Emil Emily Emma Eric Erik Erin Esther
    Ethan Eva Evan Faith Felix Fern Finn Flora Frank Fred Freya Gail George Gina Glen Grace
    Greta Gus Hal Hanna Harry Hazel Heidi Helen Henry Hilda Holly Hugo Ian Ida Igor Ira Iris
    Isaac Isla Ivan Ivy Jack Jacob Jade James Jan Jane Jason Jean Jenny Joan Joel John Jonas
    Josef Joy Judy Julia Julian June Kai Karen Karl Kate Keith Kevin Kim Kira Lara Lars
    Laura Lea Leah Lena Leo Leon Lila Lily Linda Lisa Lola Louis Lucia Lucy Luke Luna Mabel
    Maia Marco Maria Mario Mark Martha Martin Mary Max Maya Mia Mike Milo Mina Mona Monica
    Nadia Nancy Nick Nico Nina Noah Nora Norman Olaf Olga Oliver Olivia Omar Oscar Otto Owen
    Pablo Paul Paula Pedro Penny Peter Petra Polly Rachel Ralph Ramon Ray Rita Robert Robin
    Roger Roman Rosa Rose Ruben Ruby Ruth Ryan Sally Sam Sara Silvia Simon Sofia Sonia
    Stella Sven Tania Tara Ted Teo Tessa Theo Thomas Tilda Tim Tina Toby Tom Tony Tracy Vera
    Victor Viola Walter Wanda Will Yara Zara Zelda Zoe
    """.split()
)

ANIMALS: Final[tuple[str, ...]] = tuple(
    """
    cat dog fox owl bear wolf horse cow sheep goat pig duck hen mouse rabbit frog fish bird bee
    lion falcon
    """.split()
)

SOUNDS: Final[dict[str, str]] = {
    "cat": "meow",
    "dog": "woof",
    "cow": "moo",
    "sheep": "baa",
    "duck": "quack",
    "bee": "buzz",
    "frog": "croak",
    "pig": "oink",
    "lion": "roar",
    "wolf": "howl",
}

COLOURS: Final[tuple[str, ...]] = tuple("red blue green yellow white black brown grey".split())

COLOUR_OF: Final[dict[str, str]] = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "the sun": "yellow",
    "a lemon": "yellow",
    "blood": "red",
    "a tree trunk": "brown",
    "an elephant": "grey",
    "milk": "white",
    "a leaf": "green",
    "the sea": "blue",
}

CAPITALS: Final[dict[str, str]] = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Austria": "Vienna",
    "Norway": "Oslo",
    "Greece": "Athens",
    "Egypt": "Cairo",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Peru": "Lima",
    "Cuba": "Havana",
    "Kenya": "Nairobi",
    "Poland": "Warsaw",
    "Ireland": "Dublin",
    "Portugal": "Lisbon",
    "England": "London",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
}

OPPOSITES: Final[tuple[tuple[str, str], ...]] = (
    ("hot", "cold"),
    ("big", "small"),
    ("old", "new"),
    ("day", "night"),
    ("up", "down"),
    ("fast", "slow"),
    ("light", "dark"),
    ("wet", "dry"),
    ("happy", "sad"),
    ("open", "closed"),
    ("full", "empty"),
    ("left", "right"),
    ("early", "late"),
    ("loud", "quiet"),
)

DAYS: Final[tuple[str, ...]] = (
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
)

MONTHS: Final[tuple[str, ...]] = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)

PLACES: Final[tuple[str, ...]] = tuple(
    "garden house forest river village market school harbour field kitchen tower bridge".split()
)

THINGS: Final[tuple[str, ...]] = tuple(
    "book lamp apple ball key basket letter coat hat stone box bell cup drum kite boat".split()
)

ADJECTIVES: Final[tuple[str, ...]] = tuple("small old young happy quiet brave clever tired kind hungry".split())

WEATHER: Final[tuple[str, ...]] = ("warm", "cold", "rainy", "sunny", "windy", "cloudy")

MEANINGS: Final[dict[str, str]] = {
    "a falcon": "A falcon is a fast bird with long wings.",
    "a tiercel": "A tiercel is a male falcon.",
    "a cache": "A cache keeps things close, so that they need not be made again.",
    "a token": "A token is a small piece of text.",
    "a model": "A model is a program that learned from examples.",
    "a river": "A river is water that flows to the sea.",
    "a forest": "A forest is a place with many trees.",
    "a book": "A book is made of pages that you can read.",
    "a friend": "A friend is a person who likes you and helps you.",
    "the moon": "The moon goes around the earth and shines at night.",
    "the sun": "The sun is a star that gives us light and warmth.",
    "rain": "Rain is water that falls from the clouds.",
    "snow": "Snow is frozen water that falls in winter.",
    "bread": "Bread is food made from flour and water.",
    "a server": "A server is a program that answers requests.",
    "a computer": "A computer is a machine that follows a program.",
}

SYLLABLES: Final[tuple[str, ...]] = tuple(
    "ka lo mi ter vo sun dra pel qui zor ben ux tra ny fe gol wi sha jo ing er tion ble st".split()
)

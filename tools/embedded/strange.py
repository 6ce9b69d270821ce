"""Questions beyond what the embedded model can know: the words and forms that they are made of."""

# ruff: noqa: SIM905 - word lists read better as text

from __future__ import annotations

from typing import Final

TOPICS: Final[tuple[str, ...]] = tuple(
    """
    Python Java Linux Docker GPU CPU HTTP JSON SQL HTML Google Amazon Apple Microsoft Internet Bitcoin Shakespeare
    Einstein Newton Napoleon Mozart Bach Picasso Africa America Asia Europe Canada Brazil India Russia Mexico
    Switzerland Turkey Texas California Berlin Sydney Mars Venus Jupiter NASA Olympics Christmas Easter
    physics chemistry biology history mathematics geometry algebra philosophy religion politics economics law
    medicine music painting poetry theatre cinema football tennis chess basketball swimming cooking baking
    gardening travel weather climate energy electricity gravity light sound heat atoms molecules cells genes
    evolution dinosaurs planets stars galaxies universe ocean mountain volcano earthquake desert island
    president king queen prime minister government election war peace money bank tax price market company
    business job salary career school university teacher student exam homework essay email letter resume
    recipe pizza pasta soup cake coffee tea beer wine chocolate cheese vegetable fruit banana orange
    car train plane bicycle ship engine battery wheel road traffic airport hotel ticket holiday
    doctor hospital disease virus vaccine medicine headache sleep diet exercise yoga stress
    function algorithm compiler variable loop recursion database server network router password file
    window keyboard screen phone camera television radio robot machine learning neural transformer attention
    love happiness meaning life death time space dream memory mind soul freedom justice truth beauty
    number prime square root triangle circle equation integral derivative matrix vector probability
    sentence paragraph summary translation French German Spanish Latin Chinese grammar verb noun word
    best fastest largest tallest oldest first last new old famous important difficult simple
    make build find explain compare write read learn teach change stop start run walk fly swim win
    """.split()
)
"""English words about which the model knows nothing."""

SMALL_WORDS: Final[tuple[str, ...]] = tuple(
    "the a an of in to for with and or is are was my your this that from by on at about between".split()
)

ODD_FORMS: Final[tuple[str, ...]] = (
    "What is {}?",
    "What are {}?",
    "What is the {}?",
    "What does {} mean?",
    "What do you think about {}?",
    "What happened to {}?",
    "What is the difference between {} and water?",
    "What is the best {}?",
    "What is the meaning of {}?",
    "Explain {}.",
    "Explain {} in simple words.",
    "Explain to me how {} works.",
    "Write a poem about {}.",
    "Write an essay about {}.",
    "Write code for {}.",
    "Write a program for {}.",
    "Write a function that {}.",
    "Write an email about {}.",
    "Who is {}?",
    "Who was {}?",
    "Who invented {}?",
    "Who wrote {}?",
    "Who won {}?",
    "Who is the president of {}?",
    "Why does {}?",
    "Why is {} so big?",
    "Why do {} exist?",
    "When was {} born?",
    "When did {} begin?",
    "Where is {}?",
    "Where can I find {}?",
    "How do I {}?",
    "How does {} work?",
    "How can I {}?",
    "How many {} are there?",
    "How old is {}?",
    "How tall is {}?",
    "How much does {} cost?",
    "Translate {}.",
    "Translate {} into French.",
    "Summarise {}.",
    "Summarize this text: {}",
    "Give me a recipe for {}.",
    "Give me a list of {}.",
    "Give me ideas for {}.",
    "Give me an example of {}.",
    "Recommend a {}.",
    "Can you {}?",
    "Can you explain {}?",
    "Could you help me with {}?",
    "Do you know {}?",
    "Do you know anything about {}?",
    "Have you heard of {}?",
    "Is {} true?",
    "Are there {}?",
    "Should I {}?",
    "Tell me more about {}.",
    "Tell me something about {}.",
    "Help me with {}.",
    "I want to know about {}.",
    "I need {}.",
    "Let us talk about {}.",
    "Define {}.",
    "Describe {}.",
    "List all {}.",
    "Show me {}.",
    "Draw {}.",
    "{}",
    "{}?",
    "{}.",
    "{}!",
)

FOREIGN: Final[tuple[str, ...]] = (
    "Hallo, wie geht es dir?",
    "Was ist die Hauptstadt von Frankreich?",
    "Wer bist du?",
    "Guten Tag!",
    "Bonjour, comment allez-vous ?",
    "Quelle est la capitale de la France ?",
    "Qui es-tu ?",
    "Hola, ¿cómo estás?",
    "¿Cuál es la capital de España?",
    "¿Quién eres?",
    "Ciao, come stai?",
    "Olá, tudo bem?",
    "Hej, hur mår du?",
    "Merhaba, nasılsın?",  # noqa: RUF001 - Turkish
    "Привет, как дела?",
    "Кто ты?",
    "你好",
    "你是谁？",  # noqa: RUF001 - Chinese
    "こんにちは",
    "안녕하세요",
    "नमस्ते",
    "مرحبا",
    "😀",
    "👋 🙂",
    "Ünïcödé",
)
"""Greetings and questions in languages that the model does not speak."""

"""`tiercel chat`: talk to a server from the terminal, or pipe one question a line."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tiercel.cli.console import fail, warn

if TYPE_CHECKING:
    from tiercel.cli.conversation import Conversation

_PROMPT = "> "


def chat(
    url: Annotated[str, typer.Option(help="Where the server listens, with or without /v1.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(help="Key of the API. \\[TIERCEL_API_KEY]", metavar="KEY")] = None,
    model: Annotated[str, typer.Option(help="Model; auto: the first one the server reports.")] = "auto",
    system: Annotated[str | None, typer.Option(help="System message.", metavar="TEXT")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.", metavar="TOKENS", min=1)] = None,
    temperature: Annotated[float | None, typer.Option(help="0: always the likeliest.", min=0.0, max=2.0)] = None,
) -> int:
    """Chat with a running server. Ctrl-C stops an answer, Ctrl-D leaves.

    Piped, every line of the input is a question and the output is nothing but the answers.
    """
    # lazy: no other verb talks HTTP
    from tiercel.cli.conversation import ChatError, Conversation
    from tiercel.config import client_api_key

    sampling = {"max_tokens": max_tokens, "temperature": temperature}
    with Conversation(url, api_key or client_api_key(), system, sampling) as conversation:
        try:
            conversation.choose_model(model)
            if sys.stdin.isatty() and sys.stdout.isatty():
                return _talk(conversation)
            for line in sys.stdin:
                if line.strip():
                    _print_answer(conversation, line.rstrip("\r\n"))
        except ChatError as exc:
            fail(str(exc))
            return 1
    return 0


def _talk(conversation: "Conversation") -> int:
    # lazy: importing it gives `input` its line editing, wanted at a terminal only
    import readline  # noqa: F401

    # lazy: no other verb talks HTTP
    from tiercel.cli.conversation import ChatError

    print(f"{conversation.model} at {conversation.url}. Ctrl-C stops an answer, Ctrl-D leaves.")
    while True:
        try:
            question = input(_PROMPT)
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves)")
            continue
        if not question.strip():
            continue
        try:
            _print_answer(conversation, question)
        except KeyboardInterrupt:
            print("\n(stopped)")
        except ChatError as exc:
            print()
            warn(str(exc))


def _print_answer(conversation: "Conversation", question: str) -> None:
    for piece in conversation.ask(question):
        print(_printable(piece), end="", flush=True)
    print()


def _printable(text: str) -> str:
    """The text without control characters, which could make a terminal do things."""
    return "".join(
        char if char in "\n\t" or char.isprintable() or char.isspace() else "\N{REPLACEMENT CHARACTER}" for char in text
    )

"""`tiercel chat`: chat with a server in the terminal, or send one question per line of a pipe."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tiercel.cli.console import fail, warn

if TYPE_CHECKING:
    from tiercel.cli.conversation import ChatConversation

_PROMPT = "> "


def chat(
    url: Annotated[str, typer.Option(help="URL of the server, with or without /v1.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(help="API key. \\[TIERCEL_API_KEY]", metavar="KEY")] = None,
    model: Annotated[str, typer.Option(help="Model; auto: the first that the server reports.")] = "auto",
    system: Annotated[str | None, typer.Option(help="System message.", metavar="TEXT")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum tokens of an answer.", metavar="TOKENS", min=1)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0: greedy.", min=0.0, max=2.0)
    ] = None,
) -> int:
    """Chat with a running server. Ctrl-C stops an answer, Ctrl-D leaves.

    If the input is a pipe, every line is a question and only the answers are printed.
    """
    # lazy: no other verb needs the HTTP client
    from tiercel.cli.conversation import ChatConversation, ChatError
    from tiercel.settings.config import client_api_key

    sampling = {"max_tokens": max_tokens, "temperature": temperature}
    with ChatConversation(url, api_key or client_api_key(), system, sampling) as conversation:
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


def _talk(conversation: "ChatConversation") -> int:
    # lazy: its import adds line editing to `input`, wanted at a terminal only
    import readline  # noqa: F401

    # lazy: no other verb needs the HTTP client
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


def _print_answer(conversation: "ChatConversation", question: str) -> None:
    for piece in conversation.ask(question):
        print(_printable(piece), end="", flush=True)
    print()


def _printable(text: str) -> str:
    """Return the text with control characters replaced, because a terminal would execute them."""
    return "".join(
        char if char in "\n\t" or char.isprintable() or char.isspace() else "\N{REPLACEMENT CHARACTER}" for char in text
    )

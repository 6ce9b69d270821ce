"""One setting as an operator wrote it, and where."""

from dataclasses import dataclass
from typing import Final, Literal

Source = Literal["flag", "env", "file", "request"]
"""Who may say something, the strongest last: `request` is an administrator while the server runs."""

BODY_NAME: Final = "request body"
"""What errors call a document that came in a request."""

MASK: Final = "***"
"""What is shown of a secret."""


@dataclass(frozen=True, slots=True)
class Word:
    """One value as it was written, and the place to name when it is wrong."""

    value: object
    source: Source
    name: str  # of the flag, of the variable, or of the document
    key: str = ""  # in the document

    @property
    def place(self) -> str:
        """`--port `, `TIERCEL_PORT=` or `tiercel.toml: port = `."""
        match self.source:
            case "flag":
                return f"{self.name} "
            case "env":
                return f"{self.name}="
            case "file" | "request":
                return f"{self.name}: {self.key} = "

"""A setting as an operator wrote it, with its source."""

from dataclasses import dataclass
from typing import Final, Literal

Source = Literal["flag", "env", "file", "request"]
"""Where a value was written. `request` is an administrator's change while the server runs."""

BODY_NAME: Final = "request body"
"""The name of a document that came in a request, for error messages."""


@dataclass(frozen=True, slots=True)
class SourcedValue:
    """One value as it was written, and the place to name when it is wrong."""

    value: object
    source: Source
    name: str  # of the flag, of the variable, or of the document
    key: str = ""  # in the document

    @property
    def place(self) -> str:
        """Return the start of an error message: `--port `, `TIERCEL_PORT=` or `tiercel.toml: port = `."""
        match self.source:
            case "flag":
                return f"{self.name} "
            case "env":
                return f"{self.name}="
            case "file" | "request":
                return f"{self.name}: {self.key} = "

"""Which settings may change while the server runs, and why the others may not."""

from typing import Final

from tiercel.options import Options, Panel, flag_of

_WHY_FIXED: Final[dict[Panel, str]] = {
    "Model": "the model is loaded at the start",
    "Memory": "memory and disks are laid out at the start",
    "Scheduler": "steps are measured and laid out at the start",
    "Server": "the listener is set up at the start",
    "Access": "who may connect is set up at the start; tenants and their keys change in the tenants file",
    "Answers": "it belongs to the model, which is loaded at the start",
    "Log": "logs and traces are set up at the start",
}
_MOST_AS_STARTED: Final = ("max_num_seqs",)
"""May fall and rise again, but never over what the server started with: so many rows are laid out."""


def live_fields() -> tuple[str, ...]:
    """The fields of `Options` that may change while the server runs."""
    return tuple(name for name, field in Options.model_fields.items() if flag_of(field).is_live)


def changed_fields(before: Options, after: Options) -> tuple[str, ...]:
    """The fields of which the value is another."""
    return tuple(name for name in Options.model_fields if getattr(before, name) != getattr(after, name))


def why_restart(name: str, started: Options, after: Options) -> str | None:
    """Why a field cannot have its new value without a restart; None: it can."""
    words = flag_of(Options.model_fields[name])
    if not words.is_live:
        return _WHY_FIXED[words.panel]
    if name in _MOST_AS_STARTED:
        most: int = getattr(started, name)
        if getattr(after, name) > most:
            return f"the server started with {most:,}, and rows for so many are laid out"
    return None

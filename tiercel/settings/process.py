"""The settings that both processes act on. See `settings.py`."""

from typing import Annotated, Literal

from msgspec import Struct

from tiercel.settings.groups import LOG, MODEL, SCHEDULER
from tiercel.settings.option import Option, read_lower
from tiercel.values.tenant import PolicyName

LogFormat = Literal["json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]


class ProcessSettings(Struct, frozen=True, kw_only=True):
    """The settings that both processes act on."""

    model: Annotated[
        str, Option(MODEL, "Folder, GGUF file, or org/name in the hub's cache.", default=None)
    ]  # once resolved: a folder
    scheduling_policy: Annotated[
        PolicyName,
        Option(
            SCHEDULER,
            "Scheduling policy: fair, priority (band, then arrival) or fcfs (arrival alone, without bands).",
            "NAME",
            is_rare=True,
            is_live=True,
        ),
    ] = "fair"
    log_level: Annotated[
        LogLevel,
        Option(
            LOG, "Lowest severity logged.", "LEVEL", read=read_lower, vllm_variable="VLLM_LOGGING_LEVEL", is_live=True
        ),
    ] = "info"
    log_format: Annotated[LogFormat, Option(LOG, "Log format: json or console.", "FORMAT")] = "json"

"""The groups of the daemon's settings: the headings of `--help` and of docs/configuration.md."""

from typing import Final

from tiercel.settings.option import Group

MODEL: Final = Group("Model", "the model is loaded at the start")
MEMORY: Final = Group("Memory", "memory and disks are laid out at the start")
SCHEDULER: Final = Group("Scheduler", "steps are measured and laid out at the start")
SERVER: Final = Group("Server", "the listener is set up at the start")
ACCESS: Final = Group(
    "Access", "access is set up at the start; tenants and their keys are changed through the tenants file"
)
FLEET: Final = Group("Fleet", "connections between fronts and engines are set up at the start")
ANSWERS: Final = Group("Answers", "it belongs to the model, which is loaded at the start")
FILES: Final = Group("Files", "the folder of the files is opened at the start")
LOG: Final = Group("Log", "logs and traces are set up at the start")
GROUPS: Final = (MODEL, MEMORY, SCHEDULER, SERVER, ACCESS, FLEET, ANSWERS, FILES, LOG)

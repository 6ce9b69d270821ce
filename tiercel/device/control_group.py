"""The control groups of this process, in which limits are looked up. Versions 1 and 2 are understood."""

from collections.abc import Iterator
from pathlib import Path


def group_folders(controller: str, proc: Path, cgroups: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each group of this process that the controller limits, from the inside to the root.

    The second value tells whether the folder is of version 2. Some folders may not exist: inside a container, the
    container's own group is mounted at the root.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        is_unified = controllers == ""
        if is_unified:
            root = cgroups
        elif controller in controllers.split(","):
            root = cgroups / controller
        else:
            continue
        folder = root / path.strip("/")
        for candidate in (folder, *folder.parents):
            yield candidate, is_unified
            if candidate == root:
                break

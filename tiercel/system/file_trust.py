"""Checks that no other user of the machine has written or can change a file of the operator.

Such a file names the keys, the addresses and the folders of the server.
"""

import os
import stat

from tiercel.values.errors import ConfigError

_ROOT = 0


def check_found_file(file: os.stat_result, path: str, user: int) -> None:
    """Check a settings file that was found, not named: `user` or root owns it, and nobody else may write it.

    A folder in which the server happens to be started may belong to anybody, such as /tmp.
    Errors: ConfigError.
    """
    if file.st_uid not in (user, _ROOT):
        raise _untrusted(
            f"{path}: it belongs to user {file.st_uid}, not to user {user} or root: "
            f"name it with --config {path} if you trust it"
        )
    _check_mode(file, path, stat.S_IWGRP | stat.S_IWOTH, "go-w")


def check_named_file(file: os.stat_result, path: str) -> None:
    """Check a file that the operator named: not everybody may write it. Owner and group are the operator's choice.

    Errors: ConfigError.
    """
    if stat.S_ISREG(file.st_mode):
        _check_mode(file, path, stat.S_IWOTH, "o-w")


def check_secret_file(fd: int, path: str) -> None:
    """Check an open file that holds a secret: users beside its owner and its group may neither read nor write it.

    Errors: ConfigError.
    """
    file = os.fstat(fd)
    if stat.S_ISREG(file.st_mode) and file.st_mode & (stat.S_IROTH | stat.S_IWOTH):
        mode = stat.S_IMODE(file.st_mode)
        raise _untrusted(f"{path}: mode {mode:o} lets every user of the machine read it: run `chmod o= {path}`")


def _check_mode(file: os.stat_result, path: str, forbidden: int, change: str) -> None:
    if file.st_mode & forbidden:
        raise _untrusted(
            f"{path}: mode {stat.S_IMODE(file.st_mode):o} lets other users change it: run `chmod {change} {path}`"
        )


def _untrusted(message: str) -> ConfigError:
    return ConfigError("config.untrusted", message)

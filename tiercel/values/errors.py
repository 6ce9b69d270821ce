"""The exceptions of tiercel.

TiercelError
├── ConfigError       a flag, an environment variable or a model folder is wrong; exit code 2
├── AdmissionError    a request is refused; has an HTTP status
├── DeviceError       the device failed a step
│   └── OutOfDeviceMemoryError   the device memory did not suffice; a smaller step may succeed
├── DeviceLostError   the device fails every step from now on: the engine process must restart
├── WireError         a frame of the peer process cannot be read, or a message cannot be sent
├── OutputError       standard output of a verb cannot be written
└── InvariantError    the engine's books are inconsistent; never caught, never expected
"""

import errno


class TiercelError(Exception):
    """An error with a dotted code, a message for the user and the facts to log."""

    def __init__(self, code: str, message: str = "", **facts: object) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.facts = facts

    def __str__(self) -> str:
        facts = " ".join(f"{name}={value}" for name, value in self.facts.items())
        return f"{self.message or self.code}{f' ({facts})' if facts else ''}"


class ConfigError(TiercelError):
    """A setting is wrong. `message` is the line to print."""


class AdmissionError(TiercelError):
    """A request is refused. `status` is the HTTP status; `param` is the field in error, or None.

    `kind` is OpenAI's error type; `code` (of the base class) is OpenAI's machine-readable code.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str = "invalid_value",
        kind: str = "invalid_request_error",
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(code, message)
        self.status = status
        self.kind = kind
        self.param = param
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class DeviceError(TiercelError):
    """The device failed a step."""


class OutOfDeviceMemoryError(DeviceError):
    """The device memory did not suffice for a step."""


class DeviceLostError(TiercelError):
    """The device fails every step from now on. Only a new engine process can recover."""


class OutputError(TiercelError):
    """Standard output of a verb cannot be written. `message` is empty if its reader has ended."""


class WireError(TiercelError):
    """A frame of the peer process cannot be read, or a message cannot be sent."""


class InvariantError(TiercelError):
    """The engine's books are inconsistent."""


def system_error(error: BaseException) -> str:
    """Return the name of the system's error behind an exception, such as EROFS; else the code of ours."""
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, OSError) and cause.errno is not None:
        return errno.errorcode.get(cause.errno, str(cause.errno))
    return error.code if isinstance(error, TiercelError) else type(error).__name__

"""Every error of ours.

TiercelError
├── ConfigError       a flag, an environment variable or a model folder is wrong; exit code 2
├── AdmissionError    a request is refused; has an HTTP status
├── TransferError     bytes did not arrive between two tiers
├── DeviceError       the device failed a step
│   └── OutOfDeviceMemoryError   for lack of memory: a smaller step may succeed
├── DeviceLostError   the device fails every step from now on: the engine process must end
├── WireError         the peer process sent a frame that cannot be read
└── InvariantError    our own books disagree; never caught, never expected
"""


class TiercelError(Exception):
    """An error with a dotted code, a sentence for people and the facts behind it."""

    def __init__(self, code: str, message: str = "", **facts: object) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.facts = facts

    def __str__(self) -> str:
        facts = " ".join(f"{name}={value}" for name, value in self.facts.items())
        return f"{self.message or self.code}{f' ({facts})' if facts else ''}"


class ConfigError(TiercelError):
    """The operator asked for something that cannot be: `message` is the one line to print."""


class AdmissionError(TiercelError):
    """A request is refused. `status` is the HTTP status, `param` the field that is wrong, if one is.

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


class TransferError(TiercelError):
    """Bytes did not arrive between two tiers."""


class DeviceError(TiercelError):
    """The device failed a step."""


class OutOfDeviceMemoryError(DeviceError):
    """The device had no memory for a step."""


class DeviceLostError(TiercelError):
    """The device fails every step from now on; nobody in this process can help it."""


class WireError(TiercelError):
    """The peer process sent a frame that cannot be read."""


class InvariantError(TiercelError):
    """Our own books disagree with each other."""

"""Open the device of the settings."""

import torch

from tiercel.device.base import Device
from tiercel.device.cpu import CpuDevice
from tiercel.device.cuda import CudaDevice, open_cuda
from tiercel.settings.settings import DeviceName
from tiercel.values.errors import ConfigError, DeviceError


def open_device(name: DeviceName, threads: int | None = None) -> Device:
    """Open a device by name; `auto` takes a GPU if torch sees one.

    Errors: ConfigError if `cuda` is requested and torch sees no GPU, or if a call of the driver fails.
    """
    match name:
        case "auto":
            return _open_cuda() if torch.cuda.is_available() else CpuDevice(threads)
        case "cpu":
            return CpuDevice(threads)
        case "cuda":
            if not torch.cuda.is_available():
                build = torch.version.cuda or "none: this is a CPU build"
                raise ConfigError(
                    "device.no_cuda",
                    f"--device cuda: torch {torch.__version__} sees no GPU (CUDA of the build: {build})",
                )
            return _open_cuda()


def _open_cuda() -> CudaDevice:
    try:
        return open_cuda()
    except (DeviceError, OSError) as exc:
        raise ConfigError("device.no_driver", f"--device cuda: the driver does not answer: {exc}") from exc

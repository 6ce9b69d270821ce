"""Choosing the device."""

import torch

from device.base import Device
from device.cpu import CpuDevice
from device.cuda import CudaDevice
from tiercel.errors import ConfigError
from tiercel.settings import DeviceName


def open_device(name: DeviceName, threads: int | None = None) -> Device:
    """The device that the operator chose; `auto` takes a GPU if torch sees one.

    Errors: ConfigError when CUDA is asked for and torch sees none.
    """
    match name:
        case "auto":
            return CudaDevice() if torch.cuda.is_available() else CpuDevice(threads)
        case "cpu":
            return CpuDevice(threads)
        case "cuda":
            if not torch.cuda.is_available():
                build = torch.version.cuda or "none: this is a CPU build"
                raise ConfigError(
                    "device.no_cuda",
                    f"--device cuda: torch {torch.__version__} sees no GPU (CUDA of the build: {build})",
                )
            return CudaDevice()

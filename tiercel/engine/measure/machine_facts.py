"""The facts that measurements depend on: the model, its KV layout, the machine and the libraries."""

import platform
from pathlib import Path

import torch

from tiercel import __version__
from tiercel.device.base import Device
from tiercel.engine.attention.registry import open_attention
from tiercel.engine.models.base import Model
from tiercel.engine.native.library import load_library
from tiercel.engine.step.graphs import wants_graphs
from tiercel.settings.settings import EngineSettings
from tiercel.system.openmp import thread_facts
from tiercel.values.facts import Facts
from tiercel.values.tier import KVSpec


def machine_facts(settings: EngineSettings, model: Model, spec: KVSpec, device: Device) -> Facts:
    """Return the facts that identify a file of measurements; limits of the engine are not among them."""
    is_cuda = device.name == "cuda"
    library = load_library() if device.name == "cpu" else None
    attention = open_attention(
        settings.attention_backend, torch.device(device.name), device.processors, device.capability
    )
    return {
        "model": model.fingerprint.hex(),
        "implementation": model.impl,
        "layout": spec.facts,
        "device": device.name,
        "processor": torch.cuda.get_device_name() if is_cuda else cpu_name(),
        "processors": device.processors,
        "threads": thread_facts(),
        "torch_kernels": torch.backends.cpu.get_cpu_capability(),
        "native_kernels": None if library is None else (library.class_name, *library.switched_off),
        "attention": attention.name,  # `auto` depends on which packages are installed
        "launch": "graphs" if wants_graphs(settings, model) else "kernels",
        "torch": torch.__version__,
        "tiercel": __version__,
    }


def cpu_name() -> str:
    """Return the name of the processor in /proc/cpuinfo, else the machine type."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())

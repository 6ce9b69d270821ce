"""A device that torch's operators see as another one than the CPU, and that notes what a stream would have to do.

The code under test runs unchanged, with `device.type != "cpu"`, and computes real values. A tensor on the device is a
wrapper of one in host memory, so whatever moves bytes between the two is seen, wherever it is called.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.runtime.interpreter import InterpretedFunction

from tests.device.copy_engines import EngineCopy, Launch, Way

PLACE = torch.device("meta")  # the only kind of device that every build of torch knows and nothing has to open
_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "item")
_FREE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach")


class DeviceTensor(Tensor):
    """A tensor on the simulated device. The host cannot read it."""

    backing: Tensor

    @staticmethod
    def __new__(cls, backing: Tensor) -> "DeviceTensor":
        made = Tensor._make_wrapper_subclass(
            *(cls, backing.shape, backing.stride(), backing.storage_offset()), dtype=backing.dtype, device=PLACE
        )
        made.backing = backing
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of the simulated device")


def values_of(tensor: Tensor) -> Tensor:
    """Return the values of a tensor on the device."""
    assert isinstance(tensor, DeviceTensor)
    return tensor.backing


class SimulatedGpu(TorchDispatchMode):
    """The device. Operators and kernels that are called while it is entered are noted in `operations`."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[EngineCopy | Launch] = []
        self._graph_depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        name = func.name().removeprefix("aten::").split(".")[0]
        target = given.get("device")
        is_here = any(isinstance(leaf, DeviceTensor) for leaf in tree_leaves((args, given)))
        assert not (is_here and name in _WAITING), f"{name} waits for the device"
        result_is_here = is_here if target is None else torch.device(target).type == PLACE.type
        if target is not None:
            given["device"] = torch.device("cpu")
        if name == "pin_memory":
            return args[0].clone()
        given.pop("pin_memory", None)
        plain_args, plain_given = tree_map_only(DeviceTensor, values_of, (args, given))
        found = func(*plain_args, **plain_given)
        is_view = not func._schema.is_mutable and _shares_memory(found, plain_args)
        if (is_here or result_is_here) and not (is_view and is_here == result_is_here) and name not in _FREE:
            self._note(name, args, result_is_here)
        return tree_map_only(Tensor, DeviceTensor, found) if result_is_here else found

    def _note(self, name: str, args: tuple[Any, ...], result_is_here: bool) -> None:
        if name in ("copy_", "_to_copy", "to", "clone"):
            source = args[1] if name == "copy_" else args[0]
            from_here, to_here = isinstance(source, DeviceTensor), isinstance(args[0], DeviceTensor)
            to_here = to_here if name == "copy_" else result_is_here
            size = source.numel() * source.element_size()
            if from_here != to_here:
                self.operations.append(EngineCopy(Way.UP if to_here else Way.DOWN, size))
                return
            is_plain = args[0].dtype == source.dtype and args[0].is_contiguous() and source.is_contiguous()
            if name in ("copy_", "clone") and is_plain:
                self.operations.append(EngineCopy(Way.WITHIN, size))
                return
        self.note_launch(0)

    def note_launch(self, mapped_bytes: int) -> None:
        """Note a kernel, unless it belongs to a graph."""
        if not self._graph_depth:
            self.operations.append(Launch(mapped_bytes=mapped_bytes))

    @contextmanager
    def graph(self, seconds: float) -> Iterator[None]:
        """Note all kernels within as one launch of this duration. Copies of a graph are noted one by one."""
        self.operations.append(Launch(seconds))
        self._graph_depth += 1
        yield
        self._graph_depth -= 1


def _shares_memory(found: Any, given: Any) -> bool:
    """Return whether a result is a view of an argument. Operators such as `contiguous` are so only sometimes."""
    starts = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}
    results = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
    return bool(results) and all(result.untyped_storage().data_ptr() in starts for result in results)


class SimulatedGraph:
    """A graph that repeats its job."""

    def __init__(self, gpu: SimulatedGpu, job: Callable[[], Tensor], seconds: float) -> None:
        self._gpu = gpu
        self._job = job
        self._seconds = seconds

    def replay(self) -> Tensor:
        with self._gpu.graph(self._seconds):
            return self._job()


class SimulatedRecorder:
    """Records graphs that take this many seconds each."""

    def __init__(self, gpu: SimulatedGpu, seconds: float) -> None:
        self._gpu = gpu
        self._seconds = seconds

    def record(self, job: Callable[[], Tensor]) -> SimulatedGraph:
        return SimulatedGraph(self._gpu, job, self._seconds)


@contextmanager
def simulated_gpu() -> Iterator[SimulatedGpu]:
    """Enter a simulated device, on which Triton's kernels run in the interpreter.

    A kernel may have tensors in host memory as arguments, as it may on a GPU if they are mapped.
    """
    gpu, run = SimulatedGpu(), InterpretedFunction.run

    def run_on_gpu(kernel: Any, *args: Any, **given: Any) -> Any:
        host = [leaf for leaf in (*args, *given.values()) if isinstance(leaf, Tensor) and leaf.device.type == "cpu"]
        gpu.note_launch(sum(leaf.numel() * leaf.element_size() for leaf in host))
        return run(kernel, *tree_map_only(DeviceTensor, values_of, args), **given)

    # The whole test is in inference mode, because views of tensors that were made before cannot be wrapped in it.
    with patch.object(InterpretedFunction, "run", run_on_gpu), torch.inference_mode(), gpu:
        yield gpu

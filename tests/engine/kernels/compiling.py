"""Compiles kernels for a GPU, by default a Hopper, where there is none. Run as a script it is the process that does
so: Triton's interpreter, in which the other tests run, cannot be left again."""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HOPPER = 90
_CANNOT = 77  # exit status: this machine has no compiler


@dataclass(frozen=True)
class Job:
    """One kernel with the types of its arguments.

    `module.kernel` names it; `types` has an argument's type by its name, as Triton spells it ("*bf16", "i64", "fp32");
    `constants` are its compile-time arguments; `aligned` are the arguments that are multiples of 16, as addresses and
    strides mostly are; `capability` is that of the GPU.
    """

    module: str
    kernel: str
    types: dict[str, str]
    constants: dict[str, int | float | bool | str | None] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()
    capability: int = HOPPER


@dataclass(frozen=True)
class Compiled:
    """The result of compiling a job: its PTX, the shared memory of one program, and of one thread the registers and
    the memory that registers spill into."""

    ptx: str
    shared_bytes: int
    registers: int
    spilled_bytes: int


def compile_for_hopper(jobs: Sequence[Job]) -> list[Compiled] | None:
    """Compile in a process of its own; None where this machine has no compiler for it.

    Errors: AssertionError with the message of the compiler.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([asdict(job) for job in jobs]),
        env=environment | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode == _CANNOT:
        return None
    assert ran.returncode == 0, ran.stderr
    return [Compiled(**each) for each in json.loads(ran.stdout.splitlines()[-1])]


def _compile(job: Job) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(job.module), job.kernel)
    types = job.types | dict.fromkeys(job.constants, "constexpr")
    signature = {name: types[name] for name in kernel.arg_names}
    attrs = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(kernel.arg_names) if name in job.aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=job.constants, attrs=attrs)
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", job.capability, 32), options=options)
    return Compiled(made.asm["ptx"], made.metadata.shared, *_usage(made.asm["cubin"]))


def _usage(cubin: bytes) -> tuple[int, int]:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        reported = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", reported)
    assert found is not None, reported
    return int(found[1]), int(found[2]) + int(found[3])


def _main() -> int:
    try:
        import triton

        triton.knobs.nvidia.ptxas  # noqa: B018 it raises where there is none
    except (ImportError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return _CANNOT
    print(json.dumps([asdict(_compile(Job(**job))) for job in json.load(sys.stdin)]))
    return 0


if __name__ == "__main__":
    sys.exit(_main())

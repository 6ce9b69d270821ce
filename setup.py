"""Compile the CPU kernels while the package is built, if a C++ compiler is there; the rest is in pyproject.toml.

Without a compiler, kernels that were compiled before from the same sources are taken. If there are none either, the
package is built without kernels, for any platform, and torch computes instead.
"""

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = Path("tiercel", "engine", "native")


def load_compiler() -> ModuleType:
    """Import tiercel/engine/native/build.py by its path: the package cannot be imported while it is built."""
    spec = importlib.util.spec_from_file_location("tiercel_kernels_build", NATIVE / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compiler = load_compiler()


class BuildKernels(build_ext):
    """Compiles the one library that tiercel/engine/native/build.py describes."""

    def run(self) -> None:
        """Compile into the build folder, or into the source folder for an editable installation."""
        beside = NATIVE / compiler.LIBRARY_NAME
        target = beside if self.inplace else Path(self.build_lib) / beside
        try:
            compiler.compile_library(target)
        except compiler.CompilerError as exc:
            if compiler.is_current(beside):
                print(f"tiercel: taking the kernels in {beside}: {exc}", file=sys.stderr)
                if target != beside:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(beside, target)
                return
            print(f"tiercel: built without CPU kernels, torch computes, which is slower: {exc}", file=sys.stderr)
            if target != beside:
                target.unlink(missing_ok=True)  # left by an earlier build
            self.extensions = self.distribution.ext_modules = []

    def get_ext_filename(self, fullname: str) -> str:
        """Return a name without Python's version, because the library does not use Python."""
        return str(Path(*fullname.split("."))) + ".so"


class KernelWheel(bdist_wheel):
    """A wheel for any Python 3: with kernels for this platform, without them for every platform."""

    @property
    def root_is_pure(self) -> bool:
        """Return whether there are no kernels, which is known only after they were to be compiled."""
        return not self.distribution.has_ext_modules()

    @root_is_pure.setter
    def root_is_pure(self, value: bool) -> None:
        """Ignore the value that setuptools computes before compiling."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag of the wheel: Python, its ABI and the platform."""
        return "py3", "none", super().get_tag()[2]


KERNELS = Extension(
    "tiercel.engine.native." + compiler.LIBRARY_NAME.removesuffix(".so"),
    sources=[],  # compiled by build.py
    depends=[path.as_posix() for path in sorted((NATIVE / "src").iterdir())],  # a source distribution has these
)

setup(ext_modules=[KERNELS], cmdclass={"build_ext": BuildKernels, "bdist_wheel": KernelWheel})

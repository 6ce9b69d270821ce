"""Compile the CPU kernels while the package is built, if a C++ compiler is there; the rest is in pyproject.toml.

Without a compiler the package is built without them, and torch computes instead.
"""

import sys
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent / "engine" / "native"))
from build import LIBRARY_NAME, CompilerError, compile_library


class BuildKernels(build_ext):
    """Compiles the one library that engine/native/build.py describes."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            compile_library(target)
        except CompilerError as exc:
            print(f"tiercel: built without CPU kernels, torch computes several times slower: {exc}", file=sys.stderr)

    def get_ext_filename(self, fullname: str) -> str:
        """Return a name without Python's version, because the library does not use Python."""
        return str(Path(*fullname.split("."))) + ".so"

    def copy_extensions_to_source(self) -> None:
        """Copy the library for an editable installation, if it was compiled."""
        if all(Path(self.get_ext_fullpath(ext.name)).exists() for ext in self.extensions):
            super().copy_extensions_to_source()

    def get_outputs(self) -> list[str]:
        return [name for name in super().get_outputs() if Path(name).exists()]


class PlatformWheel(bdist_wheel):
    """A wheel for this platform and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    distclass=Distribution,
    ext_modules=[Extension("tiercel.engine.native." + LIBRARY_NAME.removesuffix(".so"), sources=[])],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)

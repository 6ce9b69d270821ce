"""Check that a folder of wheels is complete for the target machine.

    python wheel_needs.py FOLDER

Reads the metadata of each wheel, and the dependencies of pyproject.toml. Exit code 1, with a line for each dependency
that is missing or has a wrong version.
"""

import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

MAX_BYTES = 40_000_000
PYTHON = {"python_version": "3.12", "python_full_version": "3.12.0", "implementation_name": "cpython"}
# Minimum versions installed on the machine, as required by torch 2.11 and transformers 5.
PRESENT = {
    "torch": "2.11.0",
    "triton": "3.6.0",
    "transformers": "5.17.0",
    "numpy": "2.5.2",
    "huggingface-hub": "1.3.0",
    "tokenizers": "0.22.0",
    "safetensors": "0.6.0",
    "pyyaml": "6.0.2",
    "jinja2": "3.1.6",
    "packaging": "25.0",
}


def read_wheels(folder: Path) -> dict[str, tuple[Version, list[Requirement]]]:
    """Return version and requirements of each wheel, without extras."""
    environment = {**default_environment(), **PYTHON, "extra": ""}
    found: dict[str, tuple[Version, list[Requirement]]] = {}
    for path in sorted(folder.glob("*.whl")):
        name, version, *_ = parse_wheel_filename(path.name)
        with zipfile.ZipFile(path) as wheel:
            (metadata,) = [member for member in wheel.namelist() if member.endswith(".dist-info/METADATA")]
            fields = Parser().parsestr(wheel.read(metadata).decode())
        wanted = [Requirement(line) for line in fields.get_all("Requires-Dist", [])]
        found[name] = version, [one for one in wanted if one.marker is None or one.marker.evaluate(environment)]
    return found


def lacking(folder: Path, project: Path) -> list[str]:
    """Return one line per missing or conflicting requirement."""
    wheels = read_wheels(folder)
    versions = {canonicalize_name(name): Version(text) for name, text in PRESENT.items()}
    versions |= {canonicalize_name(name): version for name, (version, _) in wheels.items()}
    ours = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    requirements = [("tiercel", Requirement(line)) for line in ours]
    requirements += [(name, one) for name, (_, wanted) in wheels.items() for one in wanted]
    lines: list[str] = []
    for name, requirement in requirements:
        version = versions.get(canonicalize_name(requirement.name))
        if version is None:
            lines.append(f"{name} requires {requirement}: not installed")
        elif not requirement.specifier.contains(version, prereleases=True):
            lines.append(f"{name} requires {requirement}: installed is {version}")
    return lines


def main(words: list[str]) -> int:
    """Run the check; return the exit code."""
    if len(words) != 1 or not Path(words[0]).is_dir():
        print("usage: python wheel_needs.py FOLDER", file=sys.stderr)
        return 2
    folder = Path(words[0])
    lines = lacking(folder, Path(__file__).resolve().parents[2] / "pyproject.toml")
    sizes = [path.stat().st_size for path in folder.glob("*.whl")]
    print(f"{len(sizes)} wheels, {sum(sizes) / 1e6:.1f} MB in {folder}")
    if sum(sizes) > MAX_BYTES:
        lines.append(f"over {MAX_BYTES / 1e6:.0f} MB")
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

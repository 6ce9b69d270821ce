"""Print the dependencies of pyproject.toml and of the given extras, one per line, for `pip install -r`.

python3 requirements.py EXTRA...   in the folder of pyproject.toml
"""

import sys
import tomllib
from pathlib import Path


def main(extras: list[str]) -> int:
    """Print the dependencies. Return the exit code: 2 for an unknown extra."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    missing = [extra for extra in extras if extra not in optional]
    if missing:
        print(f"no such extra: {', '.join(missing)}; there are {', '.join(optional)}", file=sys.stderr)
        return 2
    print(*project["dependencies"], *(line for extra in extras for line in optional[extra]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

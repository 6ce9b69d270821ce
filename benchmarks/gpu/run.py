"""Run all measurements on a GPU: `python benchmarks/gpu/run.py [--quick] [--sections ...]`.

This starts the package without an installation: it finds the root of the repository from its own path, and the wheels
of `wheels.sh` in the folder `site`, if it exists.
"""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    folders = [str(folder) for folder in (here.parents[1], here / "site") if folder.is_dir()]
    sys.path[:1] = folders  # replaces the folder of this file, because the package is `benchmarks.gpu`
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    runpy.run_module("benchmarks.gpu", run_name="__main__", alter_sys=True)

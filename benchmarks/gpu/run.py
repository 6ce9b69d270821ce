"""Everything that is measured on a GPU, in one run: `python benchmarks/gpu/run.py [--quick] [--sections ...]`.

Starts the package beside it where nothing is installed: the root of the repository is found from this file, and the
wheels that `wheels.sh` brought from the folder `site`, if there is one.
"""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    folders = [str(folder) for folder in (here.parents[1], here / "site") if folder.is_dir()]
    sys.path[:1] = folders  # the folder of this file is no place to import from: the package is `benchmarks.gpu`
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    runpy.run_module("benchmarks.gpu", run_name="__main__", alter_sys=True)

"""`python -m tiercel` is the command `tiercel`."""

import sys

from tiercel.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

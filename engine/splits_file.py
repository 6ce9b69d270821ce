"""The table of cuts on disk: one for each model and machine, written by `tiercel calibrate`, read at every start."""

import hashlib
import logging
from pathlib import Path

from tiercel.engine.own_file import read_own, replace_own
from tiercel.errors import ConfigError
from tiercel.scheduler.nanobatch import SplitRow, SplitTable, read_table, write_table

log = logging.getLogger(__name__)


class SplitsFile:
    """The table of one model on one machine."""

    def __init__(self, folder: str | None, facts: tuple[str, ...]) -> None:
        """`facts` name everything that ratios depend on; None for a folder keeps nothing."""
        self._identity = hashlib.sha256("\0".join(facts).encode()).hexdigest()
        self.path = None if folder is None else Path(folder) / f"splits-{self._identity[:24]}.json"

    def read(self) -> SplitTable | None:
        """The table; None when nobody searched, or the file is damaged or another's: steps are whole then."""
        if self.path is None:
            return None
        try:
            table = read_table(read_own(self.path), self._identity)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            log.warning("splits not read path=%s error=%s", self.path, exc.strerror or exc)
            return None
        except ConfigError as exc:
            log.warning("splits not taken path=%s error=%s", self.path, exc)
            return None
        log.info("splits rows=%d path=%s", len(table.rows), self.path)
        return table

    def write(self, rows: tuple[SplitRow, ...]) -> None:
        """Replace the file at once. Errors: OSError."""
        if self.path is not None:
            replace_own(self.path, write_table(SplitTable(identity=self._identity, rows=rows)))

"""Lines for the person who looks at the console: a few in a run's life, none of them a warning."""

from __future__ import annotations

import logging
import os
import sys

from everystep.text import printable, switch

log = logging.getLogger("everystep")


def announce(line: str) -> None:
    """Log the line where logging shows it, else print it to stderr. EVERYSTEP_QUIET=1 prints nothing.

    A library must not configure logging, and what is no warning would not be seen without.
    """
    line = printable(line)
    shown = log.handlers or (log.hasHandlers() and log.isEnabledFor(logging.INFO))
    if shown or switch(os.environ.get("EVERYSTEP_QUIET", "")):
        log.info("%s", line)
    elif sys.stderr is not None:  # None under pythonw and some services
        print(f"everystep: {line}", file=sys.stderr, flush=True)

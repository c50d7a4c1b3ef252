"""`everystep` and `python -m everystep`."""

from __future__ import annotations

import sys


def main() -> None:
    """A Ctrl-C while commands are still being imported ends quietly too."""
    try:
        from everystep.cli.app import app
    except KeyboardInterrupt:
        sys.exit(130)
    app()


if __name__ == "__main__":
    main()

"""`python -m tests.golden`, from the root of the repository: writes the stores anew."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from golden.make import main

if __name__ == "__main__":
    sys.exit(main())

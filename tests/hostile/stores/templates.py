"""`python -m hostile.stores.templates FOLDER`: makes the valid stores there."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from hostile.stores.jobs import JOBS, train


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for name in JOBS:
        train(name, folder / name)
    train("plain", folder / "shipped", bucket=f"file://{folder / 'bucket'}")


if __name__ == "__main__":
    main()

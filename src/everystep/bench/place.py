"""Where measurements put their runs: a folder that goes with them, whatever ends them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from everystep.lane.runtime import read_card, runtime_dir
from everystep.process.retire import retire
from everystep.store import layout


@contextmanager
def temporary_place(parent: Path | None) -> Iterator[Path]:
    """Shadows that still live when it goes would write their last words into it: they go first."""
    with tempfile.TemporaryDirectory(prefix="everystep-bench-", dir=parent) as made:
        place = Path(made)
        try:
            yield place
        finally:
            begun = {document.parent for document in place.rglob(layout.RUN_DOCUMENT)}
            for run in {place / "run", *begun}:
                dismiss(runtime_dir(str(run)))


def dismiss(folder: Path) -> None:
    """End the shadow that meets its trainer there, if one lives."""
    card = read_card(folder)
    if card is not None:
        retire(card)

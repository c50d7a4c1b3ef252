"""The step at which each atom last changed: equal versions mean equal bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Versions:
    """Of all atoms of a census. Owned by the training thread."""

    def __init__(self, known: Sequence[int]) -> None:
        self._at = list(known)

    def __len__(self) -> int:
        return len(self._at)

    def change(self, atoms: Iterable[int] | None, step: int) -> None:
        """These atoms (None: all) are no longer what they were before this step."""
        for atom in range(len(self._at)) if atoms is None else atoms:
            self._at[atom] = step

    def of(self, atoms: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._at[atom] for atom in atoms)

"""Reading a run without torch: what is in it, as numpy arrays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from everystep.errors import NothingToRecover, StepUnavailable, StoreError, UnknownVersion
from everystep.format import values
from everystep.format.base import Base
from everystep.store.bases import BaseReader, read_base
from everystep.store.bucket.tiers import locate, sync_from_bucket
from everystep.store.reach import listed
from everystep.store.runs import Candidate, read_lineage
from everystep.store.tags import LATEST, read_tags
from everystep.store.verify import Report, verify_run

if TYPE_CHECKING:
    import numpy as np

_NO_NUMPY_TYPE = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def open_run(path: str | Path) -> StoredRun:
    """Open a run for reading; the directory, or the bucket, must hold one."""
    folder, bucket = locate(path)
    if bucket is not None:
        sync_from_bucket(folder, bucket, heal=False)  # somebody may be writing there
    return StoredRun(folder)


class StoredRun:
    """The bases of a run that count. Every byte given out has been checked against its checksum."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lineage = read_lineage(path, to_look=True)
        self.run_id = lineage.run_id
        self.problems = lineage.problems
        self._candidates = lineage.candidates

    @property
    def steps(self) -> list[int]:
        """Kept steps, oldest first."""
        return sorted({candidate.entry.step for candidate in self._candidates})

    @property
    def bases(self) -> list[Candidate]:
        """Committed bases, newest first."""
        return list(self._candidates)

    @property
    def tags(self) -> dict[str, Candidate]:
        """The base that each tag pins, also where the run was rewound over it."""
        return read_tags(self.path)

    def find(self, which: str) -> Candidate:
        """The base that a user means: a step, a tag, or `latest`."""
        candidates = self._candidates
        if which.isdecimal():
            found = next((c for c in candidates if c.entry.step == int(which)), None)
        elif which == LATEST:
            found = candidates[0] if candidates else None
        else:
            found = self.tags.get(which)
        if found is None:
            raise StepUnavailable(
                f"{'step' if which.isdecimal() else 'tag'} {which} of {self.path}: not kept",
                hint=f"{self._readable}; tags: {', '.join(self.tags) or 'none'}",
            )
        return found

    @property
    def _readable(self) -> str:
        bases = listed(map(str, self.steps))
        return (
            f"bases of steps {bases}; steps that a log holds behind them are for everystep restore"
        )

    def base(self, step: int | None = None) -> Base:
        """Atoms, files and checksums of a step (default: the newest readable)."""
        for candidate in self._candidates:
            if step is None or candidate.entry.step == step:
                try:
                    return read_base(self.path, candidate)
                except UnknownVersion:
                    raise
                except StoreError:
                    if step is not None:
                        raise
        if step is not None:
            raise StepUnavailable(f"step {step} of {self.path}: not kept", hint=self._readable)
        raise NothingToRecover(f"run {self.path}: no valid base")

    def tensors(self, step: int | None = None) -> dict[str, np.ndarray]:
        """Values by atom name, slots by `name:slot`. Types numpy lacks come as raw integers."""
        import numpy as np

        base = self.base(step)
        found: dict[str, np.ndarray] = {}
        for t in BaseReader(self.path, base).tensors():
            name = base.census.atoms[t.atom].name + (f":{t.slot.strip('/')}" if t.slot else "")
            kind = _NO_NUMPY_TYPE.get(t.dtype, t.dtype)
            found[name] = np.frombuffer(t.data, dtype=kind).reshape(t.shape)
        return found

    def state(self, step: int | None = None) -> Any:
        """The user's state at a step; tensors in it are shown as (tag, payload)."""
        encoded = BaseReader(self.path, self.base(step)).session().state
        return values.decode(encoded) if encoded else {}

    def verify(self) -> Report:
        return verify_run(self.path)

"""The document of a bucket: what counts in it, all in one object."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated

import msgspec

from everystep.core.numbers import Term
from everystep.format.base import Manifest, Point, RunDocument, Tag

NUMBER_MAX = 10**12 - 1  # as many digits as its name has


class Commit(msgspec.Struct, frozen=True):
    """Numbered one after the other, each put only if its number is free: who finds it taken has lost the run.
    `manifests` are those of the lineage, oldest first."""

    number: Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)]
    run: RunDocument
    term: Term  # the one whose writer made it
    token: str  # of that term
    manifests: tuple[Manifest, ...]
    tags: tuple[Tag, ...] = ()  # of bases that are there


def only_present(manifest: Manifest, present: Collection[Point]) -> Manifest:
    """A manifest that names no base but those."""
    bases = tuple(e for e in manifest.bases if Point(manifest.term, e.step) in present)
    return msgspec.structs.replace(manifest, bases=bases)


def claiming(manifest: Manifest, before: Sequence[Manifest], reach: int) -> Manifest:
    """The manifest of a term that has put nothing yet: it changes nothing in what counts, and nothing that
    is put for others from now on counts. `reach`: how far the newest of those before goes; -1: it holds
    nothing, and is left out."""
    newest = max(before, key=lambda m: m.term, default=None)
    earlier = (newest.continues, *newest.ancestors) if newest and newest.continues else ()
    line = (Point(newest.term, reach), *earlier) if newest and reach >= 0 else earlier
    return msgspec.structs.replace(
        manifest,
        bases=(),
        dropped=(),
        continues=line[0] if line else None,
        ancestors=line[1:],
    )

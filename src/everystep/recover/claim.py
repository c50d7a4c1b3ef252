"""What recovery would find in a directory that nobody writes, at the price of a look.

Recovery reads every byte; whoever asks how a run is does not wait for that. So files of tensors are held
against the lengths in the index, and read is what a crash or a killed copy leaves unfinished: documents,
session values, the segment where the log ends. What rots elsewhere is for `everystep verify` to find.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from everystep.core.census import Census
from everystep.errors import StoreError, UnknownVersion
from everystep.format.base import Base, Point
from everystep.store.bases import check_length, open_checked, read_base, unpack_session
from everystep.store.log_reader import LogReader
from everystep.store.reach import whole_bases
from everystep.store.runs import Candidate, Lineage


class Claim(NamedTuple):
    base: Candidate
    end: Point  # of the log behind it, or the base's own
    census: Census


def claim_of(
    run: Path, lineage: Lineage, problems: list[str], *, documents_only: bool = False
) -> Claim | None:
    """The base that would be loaded, and how far its log leads; those that would be passed over are named.
    `documents_only`: the files of bases are elsewhere."""
    for candidate in whole_bases(lineage):
        try:
            base = read_base(run, candidate)
            if not documents_only:
                _look_at_files(run, base)
            log = LogReader(run, lineage, candidate.point, base.census)
            log.check_end()
            return Claim(candidate, log.end, base.census)
        except UnknownVersion as error:  # passing it over would lose steps that are there
            problems.append(str(error))
            return None
        except StoreError as error:
            problems.append(str(error))
    return None


def _look_at_files(run: Path, base: Base) -> None:
    for file in base.files:
        check_length(run, file)
    for part in base.parts:
        unpack_session(open_checked(run, part.files[part.session]), base)

"""Every name in a run's directory. Names are made from numbers, and only names that are made so are ours.

RUN/everystep.json                                   what run this is
RUN/terms/000002/manifest.json                      what counts, and which point it continues
RUN/terms/000002/bases/000000000120/base.json       what all ranks have in common, and their parts
                                    /parts/000000/index.json  tensors, versions, files, checksums
                                                 /weights.safetensors  /slots.safetensors
                                                 /session.bin          /tail.bin
RUN/terms/000002/log/000000/000001-000000000120.log   records behind that step, of rank 0
RUN/tags/best.json                                   a base that a tag pins
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from everystep.core.numbers import RANK_MAX, STEP_MAX, TERM_MAX
from everystep.errors import CorruptData, StoreError
from everystep.format.base import Base, Kind, StoredFile
from everystep.store.disk.files import TEMPORARY_PREFIX, RunPath, is_folder, names_in

RUN_DOCUMENT = "everystep.json"
MANIFEST = "manifest.json"
BASE = "base.json"
PARTS = "parts"
INDEX = "index.json"
NAMES: dict[Kind, str] = {
    "weights": "weights.safetensors",
    "slots": "slots.safetensors",
    "session": "session.bin",
    "tail": "tail.bin",
}
TAGS = "tags"
_TERM_DIGITS, _RANK_DIGITS, _SEGMENT_DIGITS, _STEP_DIGITS = 6, 6, 6, 12
_SEGMENT_MAX = 10**_SEGMENT_DIGITS - 1  # they are read in the order of their names
_NUMBER = re.compile(r"[0-9]{1,18}")  # isdigit() would take other scripts' digits, too
_SEGMENT = re.compile(rf"([0-9]{{{_SEGMENT_DIGITS}}})-([0-9]{{{_STEP_DIGITS}}})\.log")


def number_of(name: str) -> int | None:
    """Of the name of a term or a base, of a part of a log, or of a commit; None: it is no number."""
    return int(name) if _NUMBER.fullmatch(name) else None


def _numbered(what: str, number: int, digits: int, most: int) -> str:
    """A name that is found again: what would be written under another one would be lost."""
    if number > most:
        raise StoreError(
            f"name {what} {number}: no run reaches that, {most} is the last",
            hint="somebody has put this number there: everystep verify, or begin in another directory",
        )
    return f"{number:0{digits}d}"


def terms_dir(run: Path) -> RunPath:
    return RunPath(run, ("terms",))


def term_dir(run: Path, term: int) -> RunPath:
    return terms_dir(run) / f"{term:0{_TERM_DIGITS}d}"


def manifest_path(run: Path, term: int) -> RunPath:
    return term_dir(run, term) / MANIFEST


def base_dir(run: Path, term: int, step: int) -> RunPath:
    return term_dir(run, term) / "bases" / _numbered("step", step, _STEP_DIGITS, STEP_MAX)


def document_path(run: Path, term: int, step: int) -> RunPath:
    """Of what describes a base."""
    return base_dir(run, term, step) / BASE


def part_dir(run: Path, term: int, step: int, rank: int) -> RunPath:
    return base_dir(run, term, step) / PARTS / _rank_name(rank)


def _rank_name(rank: int) -> str:
    return _numbered("rank", rank, _RANK_DIGITS, RANK_MAX)


def index_path(run: Path, term: int, step: int, rank: int) -> RunPath:
    return part_dir(run, term, step, rank) / INDEX


def documents(run: Path, base: Base) -> list[RunPath]:
    """Of a base: the indexes of its parts, then what names them."""
    term, step = base.point.term, base.point.step
    indexes = [index_path(run, term, step, part.rank) for part in base.parts]
    return [*indexes, document_path(run, term, step)]


def file_path(run: Path, file: StoredFile) -> RunPath:
    return part_dir(run, file.term, file.step, file.rank) / NAMES[file.kind]


def name_of(file: StoredFile) -> str:
    """In a bucket."""
    return file_path(Path(), file).inside


def base_dirs(run: Path) -> Iterator[tuple[int, RunPath]]:
    """Folders of bases in every term, with its number, whether they count or not."""
    for term in reversed(term_numbers(run)):
        folder = term_dir(run, term) / "bases"
        for name in names_in(folder):
            step = number_of(name)
            if step is None or step > STEP_MAX or base_dir(run, term, step).name != name:
                continue
            if _is_folder(folder / name):
                yield term, folder / name


def _is_folder(path: RunPath) -> bool:
    try:
        return is_folder(path)
    except CorruptData:  # a link, or anything else that is no base
        return False


def part_dirs(base: RunPath) -> list[RunPath]:
    """Folders of the parts of a base."""
    return [path for path in _parts(base) if _is_folder(path)]


def _parts(base: RunPath) -> list[RunPath]:
    """What has the name of one."""
    parts = base / PARTS
    return (
        [parts / name for name in names_in(parts) if rank_number(name) is not None]
        if _is_folder(parts)
        else []
    )


def rank_number(name: str) -> int | None:
    """Of a folder's name; None: it is no rank's."""
    number = number_of(name)
    ours = number is not None and number <= RANK_MAX and _rank_name(number) == name
    return number if ours else None


def own_files(base: RunPath) -> list[RunPath]:
    """Files of a base's folder that we may have written, and what lies in the place of a folder of ours;
    whatever else is there is not ours to remove."""
    parts = base / PARTS
    if not _is_folder(parts):
        return _ours_in(base, (BASE, PARTS))
    found = [*_ours_in(base, (BASE,)), *_ours_in(parts, ())]
    for part in _parts(base):
        found += _ours_in(part, (INDEX, *NAMES.values())) if _is_folder(part) else [part]
    return found


def _ours_in(folder: RunPath, names: tuple[str, ...]) -> list[RunPath]:
    return [folder / n for n in names_in(folder) if n in names or n.startswith(TEMPORARY_PREFIX)]


def folders_of(path: RunPath) -> list[RunPath]:
    """The folder of the base that a file belongs to, and those between, the innermost first; none if it
    belongs to no base."""
    if path.names[2:3] != ("bases",):
        return []
    return [RunPath(path.root, path.names[:n]) for n in range(len(path.names) - 1, 3, -1)]


def term_numbers(run: Path) -> list[int]:
    """Claimed terms, newest first."""
    names = names_in(terms_dir(run))
    numbers = [n for name in names if (n := term_number(name)) and term_dir(run, n).name == name]
    return sorted(numbers, reverse=True)


def term_number(name: str) -> int | None:
    """None: no term of ours has this number."""
    number = number_of(name)
    return number if number is not None and number <= TERM_MAX else None


def term_of(path: str) -> int | None:
    """The term that a file lies in, by its path below the run; None: it is not ours."""
    words = path.split("/")
    return term_number(words[1]) if len(words) > 3 and words[0] == "terms" else None


def log_dir(run: Path, term: int, rank: int = 0) -> RunPath:
    return term_dir(run, term) / "log" / _rank_name(rank)


def segment_name(number: int, after: int) -> str:
    place = _numbered("segment", number, _SEGMENT_DIGITS, _SEGMENT_MAX)
    return f"{place}-{_numbered('step', after, _STEP_DIGITS, STEP_MAX)}.log"


def segment_number(segment: RunPath) -> int:
    return _numbers(segment.name)[0]


def segment_after(segment: RunPath) -> int:
    """The step that its first record follows."""
    return _numbers(segment.name)[1]


def _numbers(name: str) -> tuple[int, int]:
    found = _SEGMENT.fullmatch(name)
    assert found is not None, name
    return int(found[1]), int(found[2])


def is_segment(name: str) -> bool:
    return _SEGMENT.fullmatch(name) is not None


def segments(run: Path, term: int, rank: int = 0) -> list[RunPath]:
    """Of the log of one term and rank, oldest first."""
    folder = log_dir(run, term, rank)
    return [folder / name for name in names_in(folder) if is_segment(name)]


def tags_dir(run: Path) -> RunPath:
    return RunPath(run, (TAGS,))


def tag_path(run: Path, name: str) -> RunPath:
    return tags_dir(run) / f"{name}.json"

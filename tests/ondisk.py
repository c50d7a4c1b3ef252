"""Where the files of a run lie, as plain paths: tests damage, remove and count them."""

from __future__ import annotations

from pathlib import Path

from everystep.store import layout
from everystep.store.disk.files import TEMPORARY_PREFIX, RunPath
from everystep.store.layout import (
    BASE,
    INDEX,
    MANIFEST,
    RUN_DOCUMENT,
    TAGS,
    segment_name,
    term_numbers,
)

WEIGHTS, SLOTS, SESSION, TAIL = (
    layout.NAMES[kind] for kind in ("weights", "slots", "session", "tail")
)


def place(path: Path) -> RunPath:
    """For what reads and writes files of a run."""
    return RunPath(path.parent) / path.name


def term_dir(run: Path, term: int) -> Path:
    return Path(layout.term_dir(run, term))


def base_dir(run: Path, term: int, step: int) -> Path:
    return Path(layout.base_dir(run, term, step))


def part_dir(run: Path, term: int, step: int) -> Path:
    return Path(layout.part_dir(run, term, step, 0))


def part_dirs(run: Path) -> list[Path]:
    return [Path(part) for _, base in layout.base_dirs(run) for part in layout.part_dirs(base)]


def base_dirs(run: Path) -> list[Path]:
    return [Path(folder) for _, folder in layout.base_dirs(run)]


def log_dir(run: Path, term: int) -> Path:
    return Path(layout.log_dir(run, term))


def segments(run: Path, term: int) -> list[Path]:
    return [Path(path) for path in layout.segments(run, term)]


def segment_after(path: Path) -> int:
    return layout.segment_after(place(path))


def tag_path(run: Path, name: str) -> Path:
    return Path(layout.tag_path(run, name))


__all__ = [
    "BASE",
    "INDEX",
    "MANIFEST",
    "RUN_DOCUMENT",
    "SESSION",
    "SLOTS",
    "TAGS",
    "TAIL",
    "TEMPORARY_PREFIX",
    "WEIGHTS",
    "base_dir",
    "base_dirs",
    "log_dir",
    "part_dir",
    "part_dirs",
    "place",
    "segment_after",
    "segment_name",
    "segments",
    "tag_path",
    "term_dir",
    "term_numbers",
]

"""Names that pin bases: a small file each, so that anybody may add one while a shadow writes.

Retention forgets a base in the manifest first and looks for tags afterwards; who sets a tag writes it first
and looks for the base afterwards. So either the base stays, or whoever wanted the tag is told.
"""

from __future__ import annotations

import re
from pathlib import Path

from everystep.errors import CorruptData, StepUnavailable, UsageError
from everystep.format.base import Point, Tag
from everystep.format.document import pack_document, unpack_document
from everystep.format.values import shown
from everystep.store import layout
from everystep.store.disk.commit import write_document
from everystep.store.disk.files import (
    RunPath,
    look_at,
    make_folder,
    names_in,
    read_file,
    readable,
    remove_file,
    sync_folder,
)
from everystep.store.runs import Candidate, read_lineage

LATEST = "latest"
_NAME = re.compile(r"(?!\d+$)[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


def read_tags(run: Path) -> dict[str, Candidate]:
    """The base that each tag pins, by name; a damaged tag is an error, for nobody knows what it pins."""
    found: dict[str, Candidate] = {}
    for name in _names(run):
        path = layout.tag_path(run, name)
        try:
            with readable(path):
                data = read_file(path)
        except FileNotFoundError:  # removed meanwhile
            continue
        tag = unpack_document("tag", data, Tag, str(path))
        if tag.name != name:
            raise CorruptData(f"read {path}: it is the tag {shown(tag.name)}")
        found[name] = Candidate(tag.term, tag.base)
    return found


def _names(run: Path) -> list[str]:
    """Of all tags; a file whose name no tag can have is none."""
    files = names_in(layout.tags_dir(run))
    names = (name.removesuffix(".json") for name in files if name.endswith(".json"))
    return [name for name in names if is_tag_name(name)]


def tags_by_point(tags: dict[str, Candidate]) -> dict[Point, tuple[str, ...]]:
    found: dict[Point, tuple[str, ...]] = {}
    for name, candidate in tags.items():
        found[candidate.point] = (*found.get(candidate.point, ()), name)
    return found


def is_tag_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and name != LATEST


def check_tag_name(name: str) -> None:
    if not is_tag_name(name):
        raise UsageError(
            f"tag {name!r}: it cannot be the name of a tag",
            hint=f"letters, digits, '.', '_' and '-', at most 100, not a number and not {LATEST!r}",
        )


def set_tag(run: Path, name: str, step: int) -> Candidate:
    """Pin the base of a step. It is durable when this returns."""
    check_tag_name(name)
    candidate = _whole_base(run, step)
    known = read_tags(run).get(name)
    if known is not None and known.point != candidate.point:
        raise UsageError(
            f"tag {name!r} of {run}: it is at step {known.entry.step}",
            hint="remove it first, or take another name",
        )
    make_folder(layout.tags_dir(run), below=RunPath(run))
    tag = Tag(name, candidate.term, candidate.entry)
    write_document(layout.tag_path(run, name), pack_document("tag", tag))
    try:
        _whole_base(run, step)
    except StepUnavailable:
        remove_tag(run, name)
        raise
    return candidate


def remove_tag(run: Path, name: str) -> None:
    check_tag_name(name)
    if look_at(layout.tag_path(run, name)) is None:
        raise StepUnavailable(
            f"tag {name!r} of {run}: there is none",
            hint=f"tags: {', '.join(_names(run)) or 'none'}",
        )
    remove_file(layout.tag_path(run, name))
    sync_folder(layout.tags_dir(run))


def _whole_base(run: Path, step: int) -> Candidate:
    candidates = read_lineage(run).candidates
    for candidate in candidates:
        if candidate.entry.step == step and not candidate.weights_only:
            return candidate
    kept = sorted({c.entry.step for c in candidates if not c.weights_only})
    raise StepUnavailable(
        f"tag step {step} of {run}: no whole base of it is kept",
        hint=f"bases of steps {kept or 'none'} are",
    )

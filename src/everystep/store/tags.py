"""Names that pin bases: a small file each, so that anybody may add one while a shadow writes.

Retention forgets a base in the manifest first and looks for tags afterwards; who sets a tag writes it first
and looks for the base afterwards. So either the base stays, or whoever wanted the tag is told.
"""

from __future__ import annotations

import re
from pathlib import Path

from everystep.errors import StepUnavailable, UsageError
from everystep.format.base import Point, Tag
from everystep.format.document import pack_document, unpack_document
from everystep.store import layout
from everystep.store.commit import make_dirs, sync_dir, write_document
from everystep.store.runs import Candidate, read_lineage

LATEST = "latest"
_NAME = re.compile(r"(?!\d+$)[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


def read_tags(run: Path) -> dict[str, Candidate]:
    """The base that each tag pins, by name; a damaged tag is an error, for nobody knows what it pins."""
    found: dict[str, Candidate] = {}
    for path in sorted((run / layout.TAGS).glob("[!.]*.json")):
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # removed meanwhile
            continue
        tag = unpack_document("tag", data, Tag, str(path))
        found[tag.name] = Candidate(tag.epoch, tag.base)
    return found


def tags_by_point(tags: dict[str, Candidate]) -> dict[Point, tuple[str, ...]]:
    found: dict[Point, tuple[str, ...]] = {}
    for name, candidate in tags.items():
        found[candidate.point] = (*found.get(candidate.point, ()), name)
    return found


def check_tag_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name == LATEST:
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
    make_dirs(run / layout.TAGS, below=run)
    tag = Tag(name, candidate.epoch, candidate.entry)
    write_document(layout.tag_path(run, name), pack_document("tag", tag))
    try:
        _whole_base(run, step)
    except StepUnavailable:
        remove_tag(run, name)
        raise
    return candidate


def remove_tag(run: Path, name: str) -> None:
    check_tag_name(name)
    try:
        layout.tag_path(run, name).unlink()
    except FileNotFoundError:
        names = ", ".join(p.stem for p in sorted((run / layout.TAGS).glob("*.json")))
        raise StepUnavailable(
            f"tag {name!r} of {run}: there is none", hint=f"tags: {names or 'none'}"
        ) from None
    sync_dir(run / layout.TAGS)


def _whole_base(run: Path, step: int) -> Candidate:
    candidates = read_lineage(run).candidates
    for candidate in candidates:
        if candidate.entry.step == step and not candidate.weights_only:
            return candidate
    kept = sorted({c.entry.step for c in candidates if not c.weights_only})
    raise StepUnavailable(
        f"tag step {step} of {run}: no whole base of it is retained",
        hint=f"bases of steps {kept or 'none'} are",
    )

"""Puts a run's bases into a bucket, behind the local directory: files, index, then a commit that names them.

So whoever reads the bucket never finds a base named that is not there whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from everystep.errors import CorruptData, StoreError
from everystep.format.base import Manifest, Point, RunDocument, StoredFile, Tag
from everystep.format.commit import only_present
from everystep.store import layout
from everystep.store.bases import check_chunks, read_base
from everystep.store.bucket.client import PART_BYTES, Bucket
from everystep.store.bucket.commits import CommitWriter
from everystep.store.bucket.log_parts import is_log_part
from everystep.store.bucket.objects import Objects
from everystep.store.disk.files import RunPath, look_at
from everystep.store.disk.mapped import map_file
from everystep.store.runs import Candidate, check_fence, read_lineage, read_manifest, read_run
from everystep.store.tags import read_tags

Sent = Callable[[int], None]  # told of every part that goes out; waits if that was too fast


class LocalTier(NamedTuple):
    """What counts in the local directory at one moment."""

    run: RunDocument
    manifests: tuple[Manifest, ...]
    candidates: list[Candidate]  # newest first


def read_tier(run: Path) -> LocalTier:
    lineage = read_lineage(run)
    document = read_run(run)
    assert document is not None
    return LocalTier(document, lineage.manifests, lineage.candidates)


class BaseShipper:
    """One term's way into the bucket. Owned by one thread."""

    def __init__(self, bucket: Bucket, run: Path, term: int, sent: Sent) -> None:
        self._bucket, self._run, self._term, self._sent = bucket, run, term, sent
        self._objects = Objects.of_directory(bucket, run)
        self._commits: CommitWriter | None = None
        # our manifest and the tags when everything that counted here was shipped
        self._done: tuple[Manifest | None, tuple[Tag, ...]] = (None, ())
        self._committed: tuple[tuple[Manifest, ...], tuple[Tag, ...]] = ((), ())
        self.newest: Candidate | None = None  # the newest base that the bucket names
        self.behind_bytes = 0

    @property
    def claimed(self) -> bool:
        return self._commits is not None and self._commits.claimed

    @property
    def has_all_tags(self) -> bool:
        """Tags go with bases: before the first of them there is nothing to wait for."""
        return self.newest is None or self._tags() == self._done[1]

    def _tags(self) -> tuple[Tag, ...]:
        try:
            return tuple(Tag(name, c.term, c.entry) for name, c in read_tags(self._run).items())
        except (StoreError, OSError):  # retention says so; what the bucket knows of them stays
            return self._commits.tags if self._commits else ()

    def turn(self) -> None:
        """Bring the bucket to what counts here now; when it raises, what the bucket names is still there."""
        own = read_manifest(self._run, self._term)
        if own is None or (own, self._tags()) == self._done:
            return  # whatever changes here changes our own manifest, or a tag
        check_fence(self._run, self._term)
        tier = read_tier(self._run)
        self._commits = self._commits or CommitWriter(self._bucket, self._run, own)
        if not self.claimed:
            self._commits.claim(tier.run)
        tags = self._tags()
        if not tier.candidates:
            return
        there = self._objects.listing()
        tier = read_tier(self._run)  # after listing: what is there and not here was dropped here
        bases, problem = _open_bases(self._run, tier)
        problem = self._ship(self._commits, tier, tags, bases, there) or problem
        if problem is None:
            self._remove_rest(self._commits, there, bases)
            own = next((m for m in tier.manifests if m.term == self._term), None)
            self._done = (own, tags)
        elif read_tier(self._run).manifests == tier.manifests:
            raise problem  # not just dropped by retention meanwhile

    def _ship(
        self,
        commits: CommitWriter,
        tier: LocalTier,
        tags: tuple[Tag, ...],
        bases: list[_LocalBase],
        there: dict[str, int],
    ) -> CorruptData | None:
        """Newest first: it is worth most. Every base counts as soon as it is whole; what is rotten here
        would be no use there."""
        present = {base.point for base in bases if not base.missing(there)}
        lacking = {path: size for base in bases for path, size in base.missing(there).items()}
        self.behind_bytes = sum(lacking.values())
        problem = None
        for base in bases:
            try:
                for path in base.missing(there):
                    base.put(self._objects, path, self._count)
                    there[path] = base.sizes[path]
            except CorruptData as error:
                problem = problem or error
                continue
            present.add(base.point)
            self._commit(commits, tier, tags, present)
        return problem

    def _count(self, size: int) -> None:
        self.behind_bytes = max(0, self.behind_bytes - size)
        self._sent(size)

    def _commit(
        self,
        commits: CommitWriter,
        tier: LocalTier,
        tags: tuple[Tag, ...],
        present: set[Point],
    ) -> None:
        newest = next(c for c in tier.candidates if c.point in present)
        manifests = tuple(only_present(m, present) for m in tier.manifests)
        there = tuple(tag for tag in tags if Point(tag.term, tag.base.step) in present)
        if (manifests, there) != self._committed:
            commits.commit(tier.run, manifests, there)
            self._committed, self.newest = (manifests, there), newest

    def _remove_rest(
        self, commits: CommitWriter, there: Mapping[str, int], bases: list[_LocalBase]
    ) -> None:
        """What nothing here needs any more, now that the bucket names something newer. Newer terms are not
        ours to touch."""
        needed = {path for base in bases for path in base.sizes}
        old = [
            path
            for path in there
            if layout.term_of(path) in range(self._term + 1)
            and path not in needed
            and not (is_log_part(path) and self._has_segment_of(path))
        ]
        commits.check_fence()
        self._objects.delete(old)
        others = self._objects.others()
        self._bucket.delete(name for name, term in others.items() if term <= self._term)
        commits.remove_old()

    def _has_segment_of(self, part: str) -> bool:
        *folders, segment, _ = part.split("/")
        return look_at(RunPath(self._run, (*folders, segment))) is not None


def _open_bases(run: Path, tier: LocalTier) -> tuple[list[_LocalBase], CorruptData | None]:
    bases: list[_LocalBase] = []
    problem = None
    for candidate in tier.candidates:
        try:
            bases.append(_LocalBase(run, candidate))
        except CorruptData as error:
            problem = problem or error
    return bases, problem


class _LocalBase:
    """A base of the local tier, held open: retention may remove its files meanwhile."""

    def __init__(self, run: Path, candidate: Candidate) -> None:
        self.candidate, self.point = candidate, candidate.point
        base = read_base(run, candidate)
        self._files = {layout.name_of(file): file for file in base.files}
        self._data = {name: map_file(layout.file_path(run, f)) for name, f in self._files.items()}
        # they are sent last
        self._data |= {path.inside: map_file(path) for path in layout.documents(run, base)}
        self.sizes = {name: len(data) for name, data in self._data.items()}

    def missing(self, there: Mapping[str, int]) -> dict[str, int]:
        return {path: size for path, size in self.sizes.items() if there.get(path) != size}

    def put(self, bucket: Objects, path: str, sent: Sent) -> None:
        data = self._data[path]
        if path not in self._files:
            sent(len(data))
            bucket.put(path, data)
            return
        parts = _checked_parts(self._files[path], data, sent)
        if len(data) <= PART_BYTES:
            bucket.put(path, b"".join(parts))
        else:
            bucket.put_parts(path, parts)


def _checked_parts(file: StoredFile, data: memoryview, sent: Sent) -> Iterator[memoryview]:
    """The bytes of a file, part by part, none of which goes out without its checksum being right."""
    name = layout.name_of(file)
    if len(data) != file.bytes:
        raise CorruptData(f"ship {name}: {len(data)} bytes, expected {file.bytes}")
    for at in range(0, file.bytes, PART_BYTES):
        part = data[at : at + PART_BYTES]
        check_chunks(part, at, file, f"ship {name}")
        sent(len(part))
        yield part

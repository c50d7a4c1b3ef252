"""What counts in a bucket: numbered commits, each put only if its number is free.

A term is claimed by its first commit. Whoever finds a number taken was replaced: it is fenced, and what
it put before, nobody reads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from everystep.core.tiers import Tier, furthest, unseen
from everystep.errors import CorruptData, Fenced, StoreError, UsageError
from everystep.format.base import Manifest, RunDocument, Tag
from everystep.format.checks import check_manifest
from everystep.format.commit import NUMBER_MAX, Commit, claiming
from everystep.format.document import pack_document, unpack_document
from everystep.format.values import shown
from everystep.store.bucket.client import Bucket
from everystep.store.bucket.tier_view import bucket_tier, local_tier
from everystep.store.layout import number_of
from everystep.store.runs import read_manifest
from everystep.store.tags import is_tag_name

log = logging.getLogger(__name__)

_FOLDER = "commits"
_TRIES = 5


def commit_path(number: int) -> str:
    return f"{_FOLDER}/{number:012d}.json"


def commit_numbers(bucket: Bucket) -> list[int]:
    """Newest first. What has another name than a commit of ours is none."""
    found = bucket.listing(_FOLDER)
    names = [path.rpartition("/")[2].removesuffix(".json") for path in found]
    numbers = {n for name in names if (n := number_of(name)) and n <= NUMBER_MAX}
    return sorted((n for n in numbers if commit_path(n) in found), reverse=True)


def read_newest(bucket: Bucket) -> Commit | None:
    """The newest commit that checks out; None if the bucket holds no run."""
    for _ in range(_TRIES):
        numbers = commit_numbers(bucket)
        problem: CorruptData | None = None
        for number in numbers:
            path = commit_path(number)
            data = bucket.read(path)
            if data is None:
                continue  # removed since it was listed: newer ones are there
            try:
                return _unpack(number, data, f"{bucket.url}/{path}")
            except CorruptData as error:
                log.warning("commit_skipped %s", error)
                problem = problem or error
        if problem is not None:
            raise CorruptData(
                f"{problem}, and no other commit can be read",
                hint=f"put one back from a copy, or give another bucket; without {bucket.url}/{_FOLDER} "
                "whoever attaches ships all that the directory holds again",
            )
        if not numbers:
            return None
    raise StoreError(f"read {bucket.url}: its commits change faster than they can be read")


def _unpack(number: int, data: bytes, where: str) -> Commit:
    commit = unpack_document("commit", data, Commit, where)
    if commit.number != number:
        raise CorruptData(f"read {where}: it is commit {commit.number}")
    tokens = [(manifest.term, manifest.token) for manifest in commit.manifests]
    if (commit.term, commit.token) not in tokens or len(dict(tokens)) < len(tokens):
        raise CorruptData(
            f"read {where}: of term {commit.term}, with manifests of {[term for term, _ in tokens]}"
        )
    for manifest in commit.manifests:
        check_manifest(manifest, where)
    for tag in commit.tags:
        if not is_tag_name(tag.name):
            raise CorruptData(f"read {where}: a tag {shown(tag.name)}")
    return commit


class CommitWriter:
    """Commits to a bucket for one term. Owned by one thread."""

    def __init__(self, bucket: Bucket, run: Path, manifest: Manifest) -> None:
        self._bucket, self._run, self._manifest = bucket, run, manifest
        self._term, self._token = manifest.term, manifest.token
        self._number: int | None = None  # of our newest commit; None: the term is not claimed yet
        self.tags: tuple[Tag, ...] = ()  # that the bucket knows

    @property
    def claimed(self) -> bool:
        return self._number is not None

    def claim(self, run: RunDocument) -> None:
        """Take the bucket over for our term, if it knows of nothing that we do not."""
        for _ in range(_TRIES):
            numbers = commit_numbers(self._bucket)
            newest = read_newest(self._bucket) if numbers else None
            self.tags = newest.tags if newest else ()
            if newest is not None and self._is_ours(newest):
                self._number = newest.number
                return
            tier = self._check(run, newest)
            if self._put_claim(max(numbers, default=0) + 1, run, newest, tier):
                # who had it before may have put log meanwhile, and said that it counts
                if newest is not None and (now := bucket_tier(self._bucket, newest)) != tier:
                    self._put_claim((self._number or 0) + 1, run, newest, now)
                    self._check_seen(newest, now)
                return
        raise StoreError(f"claim term {self._term} in {self._bucket.url}: others keep committing")

    def _put_claim(self, number: int, run: RunDocument, newest: Commit | None, tier: Tier) -> bool:
        before = newest.manifests if newest else ()
        reach = tier.marks[newest.term].step if newest else -1
        claim = (*before, claiming(self._manifest, before, reach))
        return self._put(number, run, claim, self.tags)

    def _check(self, run: RunDocument, newest: Commit | None) -> Tier:
        if newest is None:
            return Tier({})
        if newest.run.run_id != run.run_id:
            raise UsageError(
                f"ship {self._run} to {self._bucket.url}: it holds run {newest.run.run_id}, not "
                f"{run.run_id}",
                hint="give this run a prefix of its own",
            )
        tier = bucket_tier(self._bucket, newest)
        self._check_seen(newest, tier)
        return tier

    def _check_seen(self, newest: Commit, theirs: Tier) -> None:
        ours = local_tier(self._run, newest)
        if newest.term > self._term or unseen(ours, theirs):
            raise self._fenced(
                f"step {furthest(theirs)} in term {newest.term} is there, which this directory has not seen"
            )

    def commit(self, run: RunDocument, manifests: Sequence[Manifest], tags: Sequence[Tag]) -> None:
        for _ in range(_TRIES):
            self.check_fence()
            assert self._number is not None
            if self._put(self._number + 1, run, tuple(manifests), tuple(tags)):
                return
        raise self._fenced("another term owns it")

    def check_fence(self) -> None:
        """Raise unless the newest commit is ours. One may have been put though its answer was lost."""
        numbers = commit_numbers(self._bucket)
        if self._number is None or max(numbers, default=0) <= self._number:
            return
        newest = read_newest(self._bucket)
        if newest is None or not self._is_ours(newest):
            raise self._fenced("another term owns it")
        self._number = newest.number

    def _is_ours(self, commit: Commit) -> bool:
        return (commit.term, commit.token) == (self._term, self._token)

    def remove_old(self) -> None:
        """A reader may just have listed the one before the newest: that one stays."""
        assert self._number is not None
        old = [n for n in commit_numbers(self._bucket) if n < self._number - 1]
        self._bucket.delete(map(commit_path, old))

    def _put(
        self,
        number: int,
        run: RunDocument,
        manifests: tuple[Manifest, ...],
        tags: tuple[Tag, ...],
    ) -> bool:
        if number > NUMBER_MAX:
            raise StoreError(
                f"commit to {self._bucket.url}: its newest commit has the number {number - 1}, and no other "
                "can follow",
                hint=f"nobody commits as often: remove {commit_path(number - 1)} from the bucket",
            )
        commit = Commit(number, run, self._term, self._token, manifests, tags)
        if not self._bucket.create(commit_path(number), pack_document("commit", commit)):
            return False
        self._number, self.tags = number, tags
        return True

    def _fenced(self, why: str) -> Fenced:
        return _fenced(self._bucket, self._term, why)


class Fence:
    """For who puts what no commit names. Owned by one thread."""

    def __init__(self, bucket: Bucket, run: Path, term: int) -> None:
        manifest = read_manifest(run, term)
        self._bucket, self._term = bucket, term
        self._token = manifest.token if manifest else ""
        self._seen = 0

    def check(self) -> None:
        """Raise unless the newest commit is of our term."""
        number = max(commit_numbers(self._bucket), default=0)
        if number > self._seen:
            newest = read_newest(self._bucket)
            if newest is None or (newest.term, newest.token) != (self._term, self._token):
                raise _fenced(self._bucket, self._term, "another term owns it")
            self._seen = newest.number


def _fenced(bucket: Bucket, term: int, why: str) -> Fenced:
    return Fenced(
        f"commit to {bucket.url} in term {term}: {why}",
        hint="another host has gone on with this run; stop this trainer, or give it another bucket",
    )

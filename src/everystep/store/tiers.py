"""The two tiers of a run: a local directory, and a bucket that is shipped behind it.

`run="s3://bucket/prefix"` names the bucket alone; the directory then follows from the URL. Before anything is
read, `bring` makes the directory hold what the newer of the two holds; all the rest works on the directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from everystep.core.retention import Rules
from everystep.core.tiers import EpochMark, Tier, newer_tier
from everystep.errors import StoreError, UsageError
from everystep.format.base import Manifest, Point
from everystep.format.commit import Commit
from everystep.store import layout
from everystep.store.bases import read_index
from everystep.store.bucket import Bucket, is_url, redacted
from everystep.store.bucket_commits import read_newest
from everystep.store.fetch import Fetcher, ensure_run, fetch_documents, remove_leftovers
from everystep.store.files import remove_file
from everystep.store.log_reader import LogReader
from everystep.store.runs import (
    claim_epoch,
    identify,
    newest_manifest,
    read_lineage,
    read_manifest,
)
from everystep.text import is_text

log = logging.getLogger("everystep")

_TRIES = 3


def locate(run: str | Path, bucket: str | None = None) -> tuple[Path, str | None]:
    """A run's local directory, and the URL of its bucket if it has one."""
    check_path(run)
    if not is_url(run):
        return Path(os.path.realpath(run)), bucket
    if bucket is not None and bucket != run:
        raise UsageError(
            f"run {redacted(str(run))}: another bucket is given too, {redacted(bucket)}",
            hint="give one URL as run=, or a directory as run= and the URL as bucket=",
        )
    return local_dir(str(run)), str(run)


def check_path(run: str | Path) -> None:
    if not is_text(str(run)):
        raise UsageError(
            f"run {str(run)!r}: its path is no UTF-8 text",
            hint="rename the directory, or take another",
        )


def local_dir(url: str) -> Path:
    """Where the local tier of a bucket's run lies, if no directory was given."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("EVERYSTEP_LOCAL_DIR") or cache / "everystep")
    plain = url.rstrip("/")
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", redacted(plain))[-60:].strip("-")
    return root.absolute() / f"{readable}-{hashlib.sha256(plain.encode()).hexdigest()[:8]}"


def bring(run: Path, url: str, *, heal: bool = True) -> bool:
    """Make the local directory hold the newer lineage of both tiers, whole; True if that is the bucket's.
    `heal`: where it is the directory's own, what is damaged there is fetched."""
    bucket = Bucket(url)
    try:
        commit = read_newest(bucket)
    except StoreError as error:
        if not _local(run, None).marks:
            raise  # there may be something to resume: beginning anew would be wrong
        log.warning("bucket_unreachable run=%s: going on from the directory: %s", run, error)
        return False
    if commit is None or not _bucket_is_newer(run, bucket, commit):
        if commit is not None and heal:
            _heal(run, bucket, commit)
        return False
    for _ in range(_TRIES):
        try:
            _fetch(run, bucket, commit)
            return True
        except StoreError:
            now = read_newest(bucket)
            if now is None or now == commit:
                raise
            commit = now  # its writer has gone on, and removed what was being read
    raise StoreError(f"fetch {bucket.url}: it changes faster than it can be read")


def _bucket_is_newer(run: Path, bucket: Bucket, commit: Commit) -> bool:
    known = identify(run)[0]
    if known is not None and known != commit.run.run_id:
        raise UsageError(
            f"open {run} with {bucket.url}: the directory holds run {known}, the bucket "
            f"{commit.run.run_id}",
            hint="give this run a directory and a prefix of its own",
        )
    local, theirs = _local(run, commit), _tier(commit.manifests)
    winner = newer_tier(local, theirs)
    if winner == "neither":
        raise UsageError(
            f"open {run} with {bucket.url}: both have gone on with this run, each on its own: the directory "
            f"{_line(local)}, the bucket {_line(theirs)}",
            hint=f"everystep rewind {run} --bucket {bucket.url} --take directory (or bucket) goes on from "
            "one of them; the other is kept beside the directory",
        )
    return winner == "bucket"


def _line(tier: Tier) -> str:
    epoch = max(tier.marks)
    return f"to step {tier.marks[epoch].step} in epoch {epoch}"


def take(run: Path, url: str, which: Literal["directory", "bucket"]) -> Path:
    """Go on from one of two tiers that have gone on each on its own. The other one is kept whole, as a run
    in a directory beside this one, whose path is returned."""
    bucket = Bucket(url)
    commit = read_newest(bucket)
    local = _local(run, commit)
    theirs = _tier(commit.manifests) if commit is not None else Tier({})
    if commit is None or newer_tier(local, theirs) != "neither":
        raise UsageError(
            f"take the {which} of {run} and {bucket.url}: one of them goes on from the other",
            hint="nothing is to be decided: attach, or everystep rewind RUN STEP",
        )
    if which == "bucket":
        aside = _free_name(run, f"directory-at-{local.marks[max(local.marks)].step}")
        run.rename(aside)
        _fetch(run, bucket, commit)
        return aside
    aside = _free_name(run, f"bucket-at-{theirs.marks[max(theirs.marks)].step}")
    _fetch(aside, bucket, commit)
    newest = newest_manifest(run)
    claim_epoch(
        run,
        _end(run),
        newest.rules if newest else Rules(),
        behind=max(theirs.marks),
        over=tuple(m.token for m in commit.manifests if m.token not in _tokens(local)),
    )
    return aside


def _free_name(run: Path, what: str) -> Path:
    names = (f"{run.name}.{what}{f'-{n}' if n else ''}" for n in itertools.count())
    return next(path for name in names if not (path := run.with_name(name)).exists())


def _tokens(tier: Tier) -> set[str]:
    return {mark.token for mark in tier.marks.values()}


def _fetch(run: Path, bucket: Bucket, commit: Commit) -> None:
    run.mkdir(parents=True, exist_ok=True)
    remove_leftovers(run)
    with tempfile.TemporaryDirectory(prefix="everystep-") as folder:
        theirs = fetch_documents(bucket, commit, Path(folder))
        fetcher = Fetcher(bucket, Path(folder), run)
        fetcher.bases(theirs.candidates)
        fetcher.log(theirs)
        _set_aside_newer(run, max(m.epoch for m in commit.manifests))
        fetcher.manifests(commit)
    log.info("fetched run=%s from=%s bytes=%d", run, bucket.url, fetcher.bytes)


def _heal(run: Path, bucket: Bucket, commit: Commit) -> None:
    """What counts here and is damaged may still be whole there; recovery says what is not."""
    try:
        ensure_run(run, commit.run)
        ours = read_lineage(run)
        with tempfile.TemporaryDirectory(prefix="everystep-") as folder:
            theirs = fetch_documents(bucket, commit, Path(folder)).candidates
            fetcher = Fetcher(bucket, Path(folder), run)
            fetcher.bases([candidate for candidate in ours.candidates if candidate in theirs])
            fetcher.log(ours)
    except StoreError as error:
        log.warning("not_healed run=%s: %s", run, error)


def _tier(manifests: Sequence[Manifest]) -> Tier:
    steps = {m.epoch: max((e.step for e in m.bases), default=-1) for m in manifests}
    newest = max(manifests, key=lambda m: m.epoch, default=None)
    points = [newest.continues, *newest.ancestors] if newest and newest.continues else []
    return Tier(
        {m.epoch: EpochMark(m.token, steps[m.epoch]) for m in manifests},
        {point.epoch: point.step for point in points},
        frozenset(token for manifest in manifests for token in manifest.over),
    )


def _local(run: Path, commit: Commit | None) -> Tier:
    """Epochs of the directory that hold something, or that the bucket knows; how far the newest goes."""
    known = {m.token for m in commit.manifests} if commit else set()
    found = []
    for epoch in layout.epoch_numbers(run):
        try:
            manifest = read_manifest(run, epoch)
        except StoreError:
            continue
        holds = manifest is not None and (
            manifest.bases or layout.segments(run, epoch) or manifest.over
        )
        if manifest is not None and (holds or manifest.token in known):
            found.append(manifest)
    tier, end = _tier(found), _end(run)
    if end is not None and end.epoch in tier.marks:
        mark = tier.marks[end.epoch]
        further = mark._replace(step=max(mark.step, end.step))
        tier = tier._replace(marks={**tier.marks, end.epoch: further})
    return tier


def _end(run: Path) -> Point | None:
    """How far the directory's lineage goes, the log included, as far as it can be read."""
    with contextlib.suppress(StoreError):
        lineage = read_lineage(run)
        for candidate in lineage.candidates:
            with contextlib.suppress(StoreError):
                census = read_index(run, candidate).census
                return LogReader(run, lineage, candidate.point, census).end
    return None


def _set_aside_newer(run: Path, epoch: int) -> None:
    """Epochs that were claimed here, hold nothing, and would hide the bucket's newest one."""
    for number in layout.epoch_numbers(run):
        if number > epoch:
            remove_file(layout.manifest_path(run, number))

"""The two tiers of a run: a local directory, and a bucket that is shipped behind it.

`run="s3://bucket/prefix"` names the bucket alone; the directory then follows from the URL. Before anything is
read, `sync_from_bucket` makes the directory hold what the newer of the two holds; all else works on that.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Literal

from everystep.core.retention import Rules
from everystep.core.tiers import Tier, furthest, newer_tier, unseen
from everystep.errors import CorruptData, StoreError, UnknownVersion, UsageError
from everystep.format.base import PassedOver
from everystep.format.commit import Commit
from everystep.store import layout
from everystep.store.bucket.client import Bucket, is_url, plain_url
from everystep.store.bucket.commits import CommitWriter, read_newest
from everystep.store.bucket.fetch import Fetcher, ensure_run, fetch_documents, remove_leftovers
from everystep.store.bucket.objects import Objects
from everystep.store.bucket.tier_view import bucket_tier, line_end, local_tier
from everystep.store.disk.files import move_out, remove_file
from everystep.store.runs import (
    claim_term,
    identify,
    newest_manifest,
    read_lineage,
    read_manifest,
)
from everystep.text import is_text, redacted

log = logging.getLogger("everystep")

_TRIES = 3


def locate(run: str | Path, bucket: str | None = None) -> tuple[Path, str | None]:
    """A run's local directory, and the plain URL of its bucket if it has one."""
    check_path(run)
    behind = None if bucket is None else plain_url(bucket)
    if not is_url(run):
        return Path(os.path.realpath(run)), behind
    url = plain_url(str(run))
    if behind not in (None, url):
        raise UsageError(
            f"run {url}: another bucket is given too, {behind}",
            hint="give one URL as run=, or a directory as run= and the URL as bucket=",
        )
    return local_dir(url), url


def check_path(run: str | Path) -> None:
    if not is_text(str(run)):
        raise UsageError(
            f"run {redacted(str(run))!r}: its path is no UTF-8 text",
            hint="rename the directory, or take another",
        )


def local_dir(url: str) -> Path:
    """Where the local tier of a bucket's run lies, if no directory was given."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("EVERYSTEP_LOCAL_DIR") or cache / "everystep")
    plain = redacted(url)  # it is the same bucket with other credentials, too
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", plain)[-60:].strip("-")
    return root.absolute() / f"{readable}-{hashlib.sha256(plain.encode()).hexdigest()[:8]}"


def sync_from_bucket(run: Path, url: str, *, heal: bool = True) -> bool:
    """Make the local directory hold the newer lineage of both tiers, whole; True if that is the bucket's.
    `heal`: where it is the directory's own, what is damaged there is fetched."""
    bucket = Bucket(url)
    try:
        commit = read_newest(bucket)
    except (CorruptData, UnknownVersion):
        raise  # it is there, and may hold more than the directory
    except StoreError as error:
        if not local_tier(run, None).marks:
            raise  # there may be something to resume: beginning again would be wrong
        log.warning("bucket_unreachable run=%s: going on from the directory: %s", run, error)
        return False
    if commit is None or not _bucket_is_newer(run, bucket, commit):
        if commit is not None and heal:
            _repair_from_bucket(run, bucket, commit)
        return False
    for _ in range(_TRIES):
        try:
            _fetch(run, bucket, commit)
            return True
        except StoreError as error:
            now = read_newest(bucket)
            if now == commit and isinstance(error, CorruptData):
                _fetch(run, bucket, commit, damaged=True)
                return True
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
    local, theirs = local_tier(run, commit), bucket_tier(bucket, commit)
    winner = newer_tier(local, theirs)
    if winner == "neither":
        raise UsageError(
            f"open {run} with {bucket.url}: both have gone on with this run, each on its own: the directory "
            f"{_line(local)}, the bucket at least {_line(theirs)}",
            hint=f"everystep rewind {run} --bucket {bucket.url} --take directory (or bucket) goes on from "
            "one of them; the other is kept beside the directory",
        )
    return winner == "bucket"


def _line(tier: Tier) -> str:
    return f"to step {furthest(tier)} in term {max(tier.marks)}"


def take(run: Path, url: str, which: Literal["directory", "bucket"]) -> Path:
    """Go on from one of two tiers that have gone on each on its own. The other one is kept whole, as a run
    in a directory beside this one, whose path is returned."""
    bucket = Bucket(url)
    commit = read_newest(bucket)
    local = local_tier(run, commit)
    theirs = bucket_tier(bucket, commit) if commit is not None else Tier({})
    if commit is None or newer_tier(local, theirs) != "neither":
        raise UsageError(
            f"take the {which} of {run} and {bucket.url}: one of them goes on from the other",
            hint="nothing is to be decided: attach, or everystep rewind RUN STEP",
        )
    if which == "bucket":
        aside = _free_name(run, f"directory-at-{furthest(local)}")
        run.rename(aside)
        _fetch(run, bucket, commit)
        return aside
    aside = _free_name(run, f"bucket-at-{furthest(theirs)}")
    _fetch(aside, bucket, commit)
    newest = newest_manifest(run)
    manifest = claim_term(
        run,
        line_end(run),
        newest.rules if newest else Rules(),
        behind=max(theirs.marks),
        over=tuple(PassedOver(mark.token, mark.step) for mark in unseen(local, theirs)),
    )
    CommitWriter(bucket, run, manifest).claim(commit.run)  # whoever still writes there is fenced
    return aside


def _free_name(run: Path, what: str) -> Path:
    names = (f"{run.name}.{what}{f'-{n}' if n else ''}" for n in itertools.count())
    return next(path for name in names if not (path := run.with_name(name)).exists())


def _fetch(run: Path, bucket: Bucket, commit: Commit, *, damaged: bool = False) -> None:
    """`damaged`: bases that are not whole there are left out, as long as there is another one."""
    run.mkdir(parents=True, exist_ok=True)
    remove_leftovers(run)
    with tempfile.TemporaryDirectory(prefix="everystep-") as folder:
        theirs = fetch_documents(bucket, commit, Path(folder))
        _set_aside_others(run, commit)
        fetcher = Fetcher(Objects.of_commit(bucket, commit), Path(folder), run)
        fetcher.bases(theirs.candidates, damaged=damaged)
        fetcher.log(theirs)
        fetcher.manifests(commit)
    log.info("fetched run=%s from=%s bytes=%d", run, bucket.url, fetcher.bytes)


def _repair_from_bucket(run: Path, bucket: Bucket, commit: Commit) -> None:
    """What counts here and is damaged may still be whole there; recovery says what is not."""
    try:
        ensure_run(run, commit.run)
        ours = read_lineage(run)
        with tempfile.TemporaryDirectory(prefix="everystep-") as folder:
            theirs = fetch_documents(bucket, commit, Path(folder)).candidates
            fetcher = Fetcher(Objects.of_directory(bucket, run), Path(folder), run)
            known = [candidate for candidate in ours.candidates if candidate in theirs]
            fetcher.bases(known, damaged=True)
            fetcher.log(ours)
    except StoreError as error:
        log.warning("not_healed run=%s: %s", run, error)


def _set_aside_others(run: Path, commit: Commit) -> None:
    """Terms of this directory alone that have the number of one of the bucket's, or would hide its newest.
    What they hold was decided against; it is kept beside the run."""
    tokens = {m.term: m.token for m in commit.manifests}
    for number in layout.term_numbers(run):
        with contextlib.suppress(StoreError):
            manifest = read_manifest(run, number)
            token = manifest.token if manifest else None
            if token in (None, tokens.get(number)) or (
                number < max(tokens) and number not in tokens
            ):
                continue
            if layout.segments(run, number) or number in {
                term for term, _ in layout.base_dirs(run)
            }:
                aside = _free_name(run, f"term-{number}")
                move_out(layout.term_dir(run, number), aside)
                log.warning("set_aside run=%s term=%d to=%s", run, number, aside)
            else:
                remove_file(layout.manifest_path(run, number))

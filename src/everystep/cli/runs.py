"""Where a command finds its run: a directory, or a bucket's URL.

Of a bucket most commands need the documents alone: what counts, and the indexes. They are fetched into a
folder that goes with the command. For those that read tensors `open_run` brings the run into its local tier.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from everystep.errors import NotARun
from everystep.lane.runtime import read_card, runtime_dir
from everystep.store.bucket.client import Bucket, is_url
from everystep.store.bucket.commits import read_newest
from everystep.store.bucket.fetch import fetch_documents
from everystep.store.bucket.tiers import check_path, local_dir
from everystep.text import redacted

RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Name the run by its directory, or by the URL of its bucket.",
        show_default=False,
    ),
]


def documents_of(run: str) -> Path:
    """A directory that tells what the run holds; of a living run on this host, its own."""
    check_path(run)
    if not is_url(run):
        return Path(run)
    local = local_dir(run)
    if read_card(runtime_dir(str(local))) is not None:
        return local
    bucket = Bucket(run)
    commit = read_newest(bucket)
    if commit is None:
        raise NotARun(f"open {bucket.url}: there is no run", hint="check the URL")
    folder = Path(tempfile.mkdtemp(prefix="everystep-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    fetch_documents(bucket, commit, folder / local.name)
    return folder / local.name


def bucket_of(run: str) -> str | None:
    """Its URL as it may be shown."""
    return redacted(run) if is_url(run) else None


def shown(run: str) -> str:
    return bucket_of(run) or str(Path(run).absolute())

"""A bucket, by its URL: the few operations that everystep needs, with errors that say enough.

Objects are written whole or not at all. The only condition used is "if absent", which S3, Google, Azure
and a directory all have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from everystep.errors import CorruptData, EverystepError, StoreError, UsageError
from everystep.store.bucket.folder import FolderBucket
from everystep.text import redacted

if TYPE_CHECKING:
    from everystep.store.bucket.cloud import CloudBucket

Errors = tuple[type[Exception], ...]
SCHEMES = ("s3", "gs", "az", "file")
PART_BYTES = 8 << 20
_FORMS = (
    "write s3://bucket/prefix, gs://…, az://… or file:///directory; "
    "credentials are taken from the environment"
)
_SMALL_BYTES_MAX = 256 << 20  # of what is read at once, as of documents in a directory


def is_url(run: object) -> bool:
    """Whether a run is named by a bucket's URL rather than by a directory."""
    return isinstance(run, str) and "://" in run


def plain_url(url: str) -> str:
    """A bucket's URL without what may not be shown: nobody takes credentials from there, and what goes on
    without them cannot tell them, obstore in its errors least of all."""
    shown = redacted(url)
    with suppress(ValueError):
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        if f"{parts.scheme}://{host}{parts.path}".rstrip("/") == shown:
            return shown
    raise UsageError(f"run {shown}: this is no URL of a bucket", hint=_FORMS)


class Bucket:
    """Paths are relative to the URL. May be used by several threads."""

    def __init__(self, url: str) -> None:
        self.url = plain_url(url)
        self._store = _open(self.url)

    def listing(self, below: str = "") -> dict[str, int]:
        """Every object and its size."""
        with self._told("list", below):
            return self._store.listing(below)

    def read(self, path: str) -> bytes | None:
        """A small object; None if there is none. One that is larger than any of ours is not read."""
        with self._told("read", path):
            return self._store.read(path, _SMALL_BYTES_MAX)

    def read_part(self, path: str, start: int, end: int) -> memoryview:
        """CorruptData if the object is not there or not as long: of any other failure nothing is known."""
        if start == end:
            return memoryview(b"")
        with self._told("read", path):
            try:
                data = self._store.read_part(path, start, end)
            except FileNotFoundError as error:
                raise CorruptData(f"read {self.url}/{path}: it is not there") from error
        if len(data) != end - start:
            raise CorruptData(
                f"read {self.url}/{path}: {len(data)} bytes from {start} on, expected {end - start}"
            )
        return data

    def create(self, path: str, data: bytes) -> bool:
        """Put if absent; False: it is somebody else's. An answer that was lost is made up for by reading."""
        with self._told("create", path):
            return self._store.create(path, data) or self.read(path) == data

    def put(self, path: str, data: bytes | memoryview) -> None:
        with self._told("put", path):
            self._store.put(path, data)

    def put_parts(self, path: str, parts: Iterator[memoryview]) -> None:
        """A large object, several parts of it at a time; it is there once all of them are."""
        with self._told("put", path):
            self._store.put_parts(path, parts)

    def delete(self, paths: Iterable[str]) -> None:
        """Remove objects; one that is gone already is as well."""
        todo = list(paths)
        with self._told("delete", next(iter(todo), "")):
            self._store.delete(todo)

    @contextmanager
    def _told(self, operation: str, path: str) -> Iterator[None]:
        """Whatever else is raised becomes an error of ours that names the object and the remedy."""
        foreseen: Errors = (*self._store.failures, OSError, ValueError, NotImplementedError)
        try:
            yield
        except EverystepError:
            raise
        except foreseen as error:
            hint = "see that the bucket exists and can be reached from here"
            if isinstance(error, (*self._store.denied, PermissionError)):
                hint = "check the credentials in the environment, and what they allow"
            said = str(error).partition("\n\nDebug source")[0].strip()
            raise StoreError(f"{operation} {self.url}/{path}: {said}", hint=hint) from error


def _open(url: str) -> CloudBucket | FolderBucket:
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise UsageError(
            f"run {url}: a bucket of kind {parts.scheme!r}, expected one of {', '.join(SCHEMES)}",
            hint=_FORMS,
        )
    if parts.scheme == "file":
        return FolderBucket(Path(unquote(parts.path)))
    try:
        from everystep.store.bucket.cloud import CloudBucket

        foreseen: Errors = (*CloudBucket.failures, OSError, ValueError)
    except ImportError as error:
        raise UsageError(
            f"run {url}: obstore is not installed", hint="pip install 'everystep[bucket]'"
        ) from error
    try:
        return CloudBucket(url)
    except foreseen as error:
        said = str(error).partition("\n")[0]
        raise StoreError(
            f"open {url}: {said}",
            hint="check the URL, and the credentials in the environment",
        ) from error

"""A bucket, by its URL: the few operations that everystep needs, with bounds and with errors that say enough.

Objects are written whole or not at all. The only condition used is "if absent", which S3, Google, Azure
and a directory all have.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from everystep.errors import CorruptData, StoreError, UsageError
from everystep.text import redacted

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3", "gs", "az", "file")
PART_BYTES = 8 << 20
_FORMS = (
    "write s3://bucket/prefix, gs://…, az://… or file:///directory; "
    "credentials are taken from the environment"
)
_SMALL_BYTES_MAX = 256 << 20  # of what is read at once, as of documents in a directory
_PARALLEL = 4
_DELETED_AT_ONCE = 500
# a request is tried again within these bounds; then the caller hears of it, and tries later by itself
_RETRIES = 4
_RETRY_SECONDS = 20.0
_REQUEST_SECONDS = 120.0
_CONNECT_SECONDS = 5.0


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
        self._folder = _folder_of(self.url)

    def listing(self, below: str = "") -> dict[str, int]:
        """Every object and its size."""
        import obstore

        with self._told("list", below):
            chunks = obstore.list(self._store, prefix=below or None)
            return {item["path"]: item["size"] for chunk in chunks for item in chunk}

    def read(self, path: str) -> bytes | None:
        """A small object; None if there is none. One that is larger than any of ours is not read."""
        import obstore

        with self._told("read", path):
            try:
                found = obstore.get(self._store, path)
            except FileNotFoundError:
                return None
            size = found.meta["size"]
            if size > _SMALL_BYTES_MAX:
                raise CorruptData(
                    f"read {self.url}/{path}: {size} bytes, expected at most {_SMALL_BYTES_MAX}"
                )
            return bytes(found.bytes())

    def read_part(self, path: str, start: int, end: int) -> memoryview:
        import obstore

        with self._told("read", path):
            data = memoryview(obstore.get_range(self._store, path, start=start, end=end))
        if len(data) != end - start:
            raise StoreError(
                f"read {self.url}/{path}: {len(data)} bytes from {start} on, expected {end - start}"
            )
        return data

    def create(self, path: str, data: bytes) -> bool:
        """Put if absent; False: it is somebody else's. An answer that was lost is made up for by reading."""
        import obstore

        with self._told("create", path):
            try:
                obstore.put(self._store, path, data, mode="create")
            except obstore.exceptions.AlreadyExistsError:
                return self.read(path) == data
        return True

    def put(self, path: str, data: bytes | memoryview) -> None:
        import obstore

        with self._told("put", path):
            obstore.put(self._store, path, data, use_multipart=False)

    def put_parts(self, path: str, parts: Iterator[memoryview]) -> None:
        """A large object, several parts of it at a time; it is there once all of them are."""
        import obstore

        with self._told("put", path):
            obstore.put(self._store, path, parts, chunk_size=PART_BYTES, max_concurrency=_PARALLEL)

    def delete(self, paths: Iterable[str]) -> None:
        """Remove objects; one that is gone already is as well."""
        import obstore

        todo = list(paths)
        for i in range(0, len(todo), _DELETED_AT_ONCE):
            for path in todo[i : i + _DELETED_AT_ONCE]:
                self._check_ordinary("delete", path)
            with self._told("delete", todo[i]):
                try:
                    obstore.delete(self._store, todo[i : i + _DELETED_AT_ONCE])
                except FileNotFoundError:
                    for path in todo[i : i + _DELETED_AT_ONCE]:
                        self._delete_one(path)

    def _delete_one(self, path: str) -> None:
        import obstore

        try:
            obstore.delete(self._store, path)
        except FileNotFoundError:
            return

    def _check_ordinary(self, operation: str, path: str) -> None:
        """In a directory that serves as a bucket, nothing may lead away from it, and nothing block."""
        if self._folder is None:
            return
        at = self._folder
        for name in filter(None, path.split("/")):
            at /= name
            mode = at.lstat().st_mode if os.path.lexists(at) else 0
            if mode and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise CorruptData(
                    f"{operation} {self.url}/{path}: {at} is no ordinary file or folder",
                    hint="only the directory itself may be reached through a link",
                )

    @contextmanager
    def _told(self, operation: str, path: str) -> Iterator[None]:
        """What obstore raises becomes an error of ours that names the object and the remedy."""
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        self._check_ordinary(operation, path)
        try:
            yield
        except (BaseError, OSError, NotImplementedError) as error:
            hint = "see that the bucket exists and can be reached from here"
            if isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError):
                hint = "check the credentials in the environment, and what they allow"
            said = str(error).partition("\n\nDebug source")[0].strip()
            raise StoreError(f"{operation} {self.url}/{path}: {said}", hint=hint) from error


def _folder_of(url: str) -> Path | None:
    """The directory that serves as a bucket, if one does."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def _open(url: str) -> ObjectStore:
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        raise UsageError(
            f"run {url}: a bucket of kind {scheme!r}, expected one of {', '.join(SCHEMES)}",
            hint=_FORMS,
        )
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, from_url
    except ImportError as error:
        raise UsageError(
            f"run {url}: obstore is not installed", hint="pip install 'everystep[bucket]'"
        ) from error
    try:
        if scheme == "file":
            return LocalStore(unquote(urlsplit(url).path), mkdir=True)
        return from_url(url, **_bounds())
    except (BaseError, OSError, ValueError) as error:
        said = str(error).partition("\n")[0]
        raise StoreError(
            f"open {url}: {said}",
            hint="check the URL, and the credentials in the environment",
        ) from error


def _bounds() -> dict[str, Any]:
    return {
        "client_options": {
            "timeout": timedelta(seconds=_REQUEST_SECONDS),
            "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
            "allow_http": _plain_http_is_meant(),
        },
        "retry_config": {
            "max_retries": _RETRIES,
            "retry_timeout": timedelta(seconds=_RETRY_SECONDS),
        },
    }


def _plain_http_is_meant() -> bool:
    """Options given in code hide what the environment says of them."""
    asked = [v for k, v in os.environ.items() if k.upper().endswith("_ALLOW_HTTP")]
    return any(value.lower() in ("1", "true") for value in asked)

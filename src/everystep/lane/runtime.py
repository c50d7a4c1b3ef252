"""Where the processes of a run on this host meet: one private directory, found from the run's path."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from everystep.errors import LaneError
from everystep.lane.host import process_start
from everystep.lane.lock import is_held
from everystep.lane.place import check_place, make_private, usable_roots

_FOLDER_BYTES_MAX = 85  # a socket's path has 107 bytes, and names go behind the folder
_CARD = "shadow.json"


class ShadowCard(msgspec.Struct, frozen=True):
    """How to find a shadow, what it wrote where, and for whom; written by it once it listens."""

    pid: int
    start: int
    control: str = ""
    descriptors: str = ""
    protocol: int = 0  # of its messages; see lane/protocol.py
    run: str = ""
    run_id: str = ""  # empty: the directory held no run when it started, and none was made yet
    term: int = 0  # that it has claimed; 0: none yet
    trainer_pid: int = 0  # 0: it has gone, or has left the run
    trainer_start: int = 0
    attaches: tuple[str, ...] = ()  # that it serves, and those whose state was handed on to it
    left: tuple[str, ...] = ()  # those of lines that its trainer has gone back from


def runtime_dir(run: str) -> Path:
    """The run's meeting place, made if missing, for this user alone. Where several places could serve, it is
    the one where somebody holds the run, or else where its shadow lives: one that is better may have become
    free since they began."""
    name = hashlib.sha256(os.path.realpath(run).encode()).hexdigest()[:16]
    folders = [root / name for root in usable_roots()]
    used = (f for found in (is_held, read_card) for f in folders if found(f))
    folder = next(used, folders[0])
    if len(os.fsencode(folder)) > _FOLDER_BYTES_MAX:
        raise LaneError(
            f"runtime directory {folder}: too long for the path of a socket",
            hint="set EVERYSTEP_RUNTIME_DIR to a short path",
        )
    make_private(folder)
    return folder


def is_alive(card: ShadowCard) -> bool:
    return process_start(card.pid) == card.start


def living_trainer(card: ShadowCard | None) -> int:
    """Who records into that shadow; 0: nobody, or this process."""
    if card is None or card.trainer_pid in (0, os.getpid()):
        return 0
    return card.trainer_pid if process_start(card.trainer_pid) == card.trainer_start else 0


def read_card(folder: Path) -> ShadowCard | None:
    """The card of the run's shadow, if there is a living one. One that went after its card was read may have
    left the run to a successor, whose card is there by then."""
    card = _stored_card(folder)
    while card is not None and not is_alive(card):
        before, card = card, _stored_card(folder)
        if card == before:
            return None
    return card


def living_cards() -> Iterator[ShadowCard]:
    """Of every shadow of this user that speaks for a run on this host."""
    for root in usable_roots():
        for folder in sorted(root.iterdir()):
            card = read_card(folder)
            if card is not None:
                yield card


def _stored_card(folder: Path) -> ShadowCard | None:
    """None also where the place has become somebody else's: what a card names is asked, and killed."""
    try:
        check_place(folder)
        return msgspec.json.decode((folder / _CARD).read_bytes(), type=ShadowCard)
    except (OSError, ValueError, LaneError):
        return None


def write_card(folder: Path, card: ShadowCard) -> None:
    """Where there is no room for it, one that was written ahead takes its place."""
    temporary = folder / f"{_CARD}.{card.pid}"
    try:
        temporary.write_bytes(msgspec.json.encode(card))
    except OSError:
        temporary.unlink(missing_ok=True)
        temporary = _ahead(folder, card.pid)
        if not temporary.exists():
            raise
    temporary.replace(folder / _CARD)
    _ahead(folder, card.pid).unlink(missing_ok=True)


def write_card_ahead(folder: Path, card: ShadowCard) -> None:
    """For a shadow that is to succeed another: by then the disk may be full, and whoever is not found cannot
    hand over its state."""
    _ahead(folder, card.pid).write_bytes(msgspec.json.encode(card))


def _ahead(folder: Path, pid: int) -> Path:
    return folder / f"{_CARD}.{pid}.ahead"


def remove_card(folder: Path, pid: int) -> None:
    """Take the card away if it is still this shadow's, which may have died already."""
    card = _stored_card(folder)
    with contextlib.suppress(OSError):
        _ahead(folder, pid).unlink(missing_ok=True)
        if card is not None and card.pid == pid:
            (folder / _CARD).unlink(missing_ok=True)

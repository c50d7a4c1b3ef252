"""How others find a shadow, and where it writes: its card and sockets, and the run's directory, looked at now
and then, because cleaners, people and unmounts remove them under a process that lives for days."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from everystep.errors import EverystepError
from everystep.lane.control import AskDefer, ControlServer, ask, board_address, socket_path
from everystep.lane.descriptors import DescriptorServer
from everystep.lane.host import process_start
from everystep.lane.lock import FRESH_SECONDS
from everystep.lane.place import remake
from everystep.lane.protocol import PROTOCOL
from everystep.lane.runtime import (
    ShadowCard,
    is_alive,
    read_card,
    remove_card,
    write_card,
    write_card_ahead,
)
from everystep.process.config import ShadowConfig
from everystep.process.retire import retire
from everystep.shadow.base_writer import BaseWriter
from everystep.shadow.directory_watch import DirectoryWatch

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_ANNOUNCE_SECONDS = 5.0
_RETIRE_AGAIN_SECONDS = 30.0
_CLAIMS = ("durable_step", "durable_age_seconds", "based_step")


class Presence:
    """Owned by the main thread."""

    def __init__(
        self, config: ShadowConfig, base_writer: BaseWriter, directory_watch: DirectoryWatch
    ) -> None:
        self._directory_watch, self._noted = directory_watch, ""
        self._folder = Path(config.folder)
        self._base_writer = base_writer
        self._looked_at = self._touched_at = time.monotonic()
        self._retire_at = 0.0
        self._unretired = self._misplaced = ""
        self.card = ShadowCard(
            os.getpid(),
            process_start(os.getpid()),
            f"ipc://{config.folder}/{config.name}.control",
            f"{config.folder}/{config.name}.memory",
            PROTOCOL,
            config.run,
            config.run_id,
            trainer_pid=config.trainer_pid,
            trainer_start=config.trainer_start,
            attaches=config.known.attaches,
            left=config.known.left,
        )

    def announce(self, before: ShadowCard) -> None:
        """Whoever comes back for the run must not pass over this shadow, if its trainer dies this moment."""
        if is_alive(before):
            with contextlib.suppress(OSError):
                write_card_ahead(self._folder, self.card)
            me = AskDefer(self.card.pid, self.card.start)
            with contextlib.suppress(EverystepError):
                ask(before.control, me, timeout_seconds=_ANNOUNCE_SECONDS)

    def speak(self) -> None:
        """From now on who looks for the run's shadow finds this one."""
        write_card(self._folder, self._up_to_date())

    def retire(self, before: ShadowCard) -> bool:
        """Have the shadow before go; True once it is gone. Where it does not go, that is tried again."""
        if time.monotonic() < self._retire_at:
            return False
        try:
            retire(before)
        except EverystepError as error:
            self._retire_at = time.monotonic() + _RETIRE_AGAIN_SECONDS
            self._unretired = str(error)
            log.error("not_retired %s", error)
            return False
        self._unretired = ""
        return True

    @property
    def lost(self) -> str:
        """What became of the run's directory."""
        return self._directory_watch.state.lost

    @property
    def problem(self) -> str:
        return self.lost or self._unretired or self._misplaced or self._directory_watch.problem

    def trainer_gone(self) -> None:
        self.card = msgspec.structs.replace(self.card, trainer_pid=0, trainer_start=0)
        if self._is_ours(read_card(self._folder)):
            with contextlib.suppress(OSError):  # the next look makes the folder again
                write_card(self._folder, self.card)

    def look_after(
        self, control: ControlServer, descriptors: DescriptorServer, *, speaks: bool
    ) -> None:
        """Is everything still where others look for it? Once a second, and as soon as a term is ours: from
        then on a directory that is not there was lost, and the card must tell which one it was."""
        now = time.monotonic()
        claimed = self._base_writer.state.term != self.card.term
        if now < self._looked_at + _LOOK_SECONDS and not claimed:
            return
        self._looked_at = now
        lost, before = self.lost, self._noted
        self._noted = lost
        self._directory_watch.keep_watch()
        if lost != before:
            log.log(logging.ERROR if lost else logging.INFO, "directory_lost %s", lost or "no more")
        try:
            remake(self._folder)
            self._keep_sockets(control, descriptors)
            self._keep_card(speaks=speaks)
            if now > self._touched_at + FRESH_SECONDS:
                self._touched_at = now
                self._touch()
            self._misplaced = ""
        except (OSError, EverystepError) as error:
            told, self._misplaced = self._misplaced, f"nobody can find this shadow: {error}"
            if told != self._misplaced:
                log.warning("meeting_place_lost folder=%s error=%s", self._folder, error)

    def _keep_sockets(self, control: ControlServer, descriptors: DescriptorServer) -> None:
        if not socket_path(self.card.control).exists():
            control.bind_again()
        if not Path(self.card.descriptors).exists():
            descriptors.bind_again()

    def _keep_card(self, *, speaks: bool) -> None:
        card = self._up_to_date()
        if not speaks:
            return
        there = read_card(self._folder)
        if there is None or (self._is_ours(there) and there != card):
            write_card(self._folder, card)

    def _up_to_date(self) -> ShadowCard:
        base_writer = self._base_writer
        self.card = msgspec.structs.replace(
            self.card,
            run_id=base_writer.run_id or self.card.run_id,
            term=base_writer.state.term,
        )
        return self.card

    def _is_ours(self, card: ShadowCard | None) -> bool:
        return card is not None and card.pid == self.card.pid

    def _touch(self) -> None:
        names = [self.card.control, board_address(self.card.control), self.card.descriptors]
        paths = [socket_path(name) for name in names]
        for path in (*paths, self._folder / "shadow.json", self._folder / "shadow.log"):
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)

    def without_lost_claims(self, status: dict[str, Any]) -> dict[str, Any]:
        """A directory that is not there any more holds nothing that could be resumed from, and one that
        others go on with brings back what is theirs."""
        void = self.lost or self._base_writer.trouble.fenced
        return {**status, **dict.fromkeys(_CLAIMS)} if void else status

    def leave(self) -> None:
        remove_card(self._folder, os.getpid())

    def remove_sockets(self) -> None:
        for address in (self.card.control, board_address(self.card.control)):
            with contextlib.suppress(OSError):  # the folder may be somebody else's by now
                socket_path(address).unlink(missing_ok=True)

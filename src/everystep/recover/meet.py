"""Which shadow speaks for a run, who trains it, and whether what the two hold may be gone on from."""

from __future__ import annotations

import socket
from pathlib import Path

from everystep.core.resume import lost_directory, refuse_steps
from everystep.errors import EverystepError, RunBusy
from everystep.format.base import Point
from everystep.lane.lock import TrainerLock
from everystep.lane.runtime import ShadowCard, living_cards, living_trainer, read_card, runtime_dir
from everystep.process.retire import retire
from everystep.store.bucket.tiers import sync_from_bucket
from everystep.store.home import known_run, what_is_lost
from everystep.store.runs import identify, newest_manifest, read_lineage, read_manifest


def shadow_of(run: Path, folder: Path) -> ShadowCard | None:
    """The living shadow of a run: the one that meets others here. If the directory was moved, the one that
    serves the attach of its newest manifest, or was handed that attach's state and has not claimed a term
    yet. Before the first term there is no manifest: the run's id tells then."""
    card = read_card(folder)
    return card if card is not None else _moved_with(run)


def _moved_with(run: Path) -> ShadowCard | None:
    try:
        manifest = newest_manifest(run)
    except OSError:
        return None
    if manifest is not None and manifest.host != socket.gethostname():
        return None
    run_id = manifest.run_id if manifest else known_run(run)
    for card in living_cards() if run_id else ():
        served = (*card.attaches, *card.left)
        ours = card.run_id == run_id and (manifest is None or manifest.attach in served)
        if ours and (_is_away(card) or Path(card.run).samefile(run)):  # else this is a copy
            return card
    return None


def _is_away(card: ShadowCard) -> bool:
    return bool(what_is_lost(Path(card.run), card.run_id, card.term, card.pid))


def hold_run(run: Path, operation: str = "attach") -> tuple[Path, TrainerLock]:
    """The run's meeting place and the right to be its only trainer, or RunBusy. A lock can be lost with its
    file; the shadow of a trainer that lives tells of it all the same."""
    folder = runtime_dir(str(run))
    lock = TrainerLock(folder, str(run), operation)
    try:
        _refuse_trained(run, shadow_of(run, folder), operation)
    except BaseException:
        lock.close()
        raise
    return folder, lock


def _refuse_trained(run: Path, card: ShadowCard | None, operation: str) -> None:
    trainer = living_trainer(card)
    if trainer:
        raise RunBusy(
            f"{operation} {run}: the run is held by pid {trainer}, which its shadow records",
            hint="stop that trainer first, or give this one another run=",
        )


def check_resume(run: Path, card: ShadowCard | None, resume: str) -> bool:
    """Raise where going on would be a guess, or where the user forbade it; nothing was touched yet. True: the
    shadow's directory is lost, and what it holds is to be adopted."""
    lost = ""
    if card is not None and card.run_id:
        lost = what_is_lost(run, card.run_id, card.term, card.pid)
        if lost:
            here = known_run(run)
            other = here not in ("", card.run_id)
            lost_directory(str(run), lost, card.pid, resume, other=other)
    if resume == "never":
        steps = [c.entry.step for c in read_lineage(run).candidates] if identify(run)[0] else []
        refuse_steps(str(run), max(steps, default=None), card.pid if card else None)
    return bool(lost)


def sync_newest(run: Path, bucket: str, folder: Path, *, adopts: bool = False) -> None:
    """Have the newest of directory and bucket in the directory. A shadow of a lineage that another host has
    gone on with since then holds nothing that counts, unless the user wants it."""
    card = shadow_of(run, folder)
    if sync_from_bucket(run, bucket, heal=card is None) and card is not None and not adopts:
        retire(card)


def point_here(run: Path, point: Point) -> Point | None:
    """Where in this directory's lineage a state stands that a shadow held. A directory that lacks the term
    (it was lost, and made again) goes on from what it has."""
    try:
        if read_manifest(run, point.term) is not None:
            return point
    except EverystepError:
        return point  # damaged is not missing
    newest = newest_manifest(run)
    return Point(newest.term, point.step) if newest else None

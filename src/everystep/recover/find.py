"""The newest valid point of a run: in the memory of a living shadow, or in the store."""

from __future__ import annotations

from pathlib import Path

from everystep.lane.runtime import ShadowCard
from everystep.recover.choose import (
    missing_last_words,
    refuse_damaged,
    refuse_unknown_step,
    takes_shadows,
)
from everystep.recover.from_shadow import Answer, ask_shadow
from everystep.recover.from_store import stored_point
from everystep.recover.meet import shadow_of
from everystep.recover.point import RestorePoint
from everystep.store.reach import describe_reachable, reachable, whole_bases
from everystep.store.runs import Lineage, identify, read_lineage


def find_newest(
    run: Path,
    folder: Path | None,
    step: int | None = None,
    *,
    exact: bool = False,
    verify_lazily: bool = False,
) -> tuple[RestorePoint | None, ShadowCard | None]:
    """The newest point (or the one at `step`), and the card of the shadow that lives, if any. `exact`: not
    one whose log lacks something. `verify_lazily`: who loads it can begin again if a record is damaged, so
    records are checked when their turn comes and not now."""
    card = shadow_of(run, folder) if folder else None
    known = identify(run)[0] is not None
    answer = Answer(None)
    if card is not None and folder is not None:
        answer = ask_shadow(card, run, folder)
        known = identify(run)[0] is not None
    # read after asking: a shadow that went meanwhile has left its last words there
    lineage = read_lineage(run) if known else Lineage("", [], [])
    newest = lineage.candidates[0].entry.step if lineage.candidates else None
    if (found := answer.found) is not None:
        if takes_shadows(found.point.step, newest, step):
            problems = [*answer.problems, *lineage.problems]
            return found._replace(finished=answer.finished, problems=problems), answer.card
        found.close()
    lazily = verify_lazily and step is None
    return _from_store(run, lineage, answer, step, exact=exact, lazily=lazily), answer.card


def _from_store(
    run: Path,
    lineage: Lineage,
    answer: Answer,
    step: int | None,
    *,
    exact: bool,
    lazily: bool,
) -> RestorePoint | None:
    """What the store has, or why that is not what should be there."""
    damage = list(lineage.problems)
    stored = stored_point(run, lineage, step, damage, exact=exact, verify_lazily=lazily)
    problems = [*answer.problems, *damage]
    if stored is None and step is None and damage:
        refuse_damaged(str(run), damage)
    if answer.last_words is not None and step is None:
        there = stored.point.step if stored else None
        problems += missing_last_words(str(run), there, answer.last_words, problems)
    if stored is None and step is not None:
        in_memory = answer.found.point.step if answer.found else None
        _refuse_unknown_step(run, lineage, step, in_memory)
    return stored and stored._replace(finished=answer.finished, problems=problems)


def _refuse_unknown_step(run: Path, lineage: Lineage, step: int, in_memory: int | None) -> None:
    """A base of this step that is damaged is the caller's to tell."""
    if any(c.entry.step == step for c in whole_bases(lineage)):
        return
    bases, steps = reachable(run, lineage)
    refuse_unknown_step(
        str(run),
        step,
        logged=steps,
        listed={c.entry.step for c in lineage.candidates},
        others=describe_reachable(bases, steps, in_memory),
    )

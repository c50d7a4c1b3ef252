"""Which of the points that were found is loaded, and what is refused instead. Pure: no I/O in here."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from everystep.errors import NothingToRecover, StepUnavailable


def takes_shadows(in_shadow: int | None, in_store: int | None, wanted: int | None) -> bool:
    """Whether the point of a living shadow is loaded, and not what the store has. Given are the steps of
    both (None: there is none), and the step that is wanted (None: the newest)."""
    if in_shadow is None or wanted is not None:
        return in_shadow is not None and in_shadow == wanted
    return in_store is None or in_shadow >= in_store


def log_until(base: int, wanted: int | None, *, exact: bool, lacking: bool) -> int | None:
    """How far the log behind a base is read; None: to its end. Who wants what is `exact` reads nothing of a
    log that is `lacking` something."""
    return base if exact and lacking else wanted


def refuse_damaged(run: str, damage: Sequence[str]) -> None:
    """Only the user decides to start over where steps were recorded."""
    first = damage[0].partition("\n")[0]
    more = f", and {len(damage) - 1} more" if len(damage) > 1 else ""
    raise NothingToRecover(
        f"resume {run}: no step in it is whole; damaged: {first}{more}",
        hint=f"everystep verify {run} lists the damage; put files back from a copy, or move the directory "
        "away to begin at step 0",
    )


def missing_last_words(
    run: str, in_store: int | None, held: int, problems: Sequence[str]
) -> list[str]:
    """What a shadow held and did not leave in the store is lost, and not in silence."""
    if in_store is None:
        raise NothingToRecover(
            f"resume {run}: its shadow held step {held} and left nothing in the store "
            f"({'; '.join(problems)})",
            hint="to begin at step 0, attach again",
        )
    if in_store >= held:
        return []
    return [f"the shadow held step {held} and left step {in_store} in the store"]


def refuse_unknown_step(
    run: str, step: int, *, logged: Collection[int], listed: Collection[int], others: str
) -> None:
    """Say which steps can be had. `logged`: what the log leads to; `listed`: of all bases, those without
    optimizer slots too."""
    if step in logged:
        raise StepUnavailable(
            f"step {step} of {run}: the log before it is damaged",
            hint=f"everystep verify says where; damage aside, {others}",
        )
    if step in listed:
        raise StepUnavailable(
            f"step {step} of {run}: only its weights are kept, not its optimizer slots",
            hint=f"everystep export gives the weights; {others}",
        )
    raise StepUnavailable(f"step {step} of {run}: not kept", hint=others)

"""Whether an attach may go on with what is there: `resume`, and a directory that is not there."""

from __future__ import annotations

from everystep.errors import DirectoryLost, NothingToRecover, RunHasSteps


def lost_directory(run: str, lost: str, pid: int, resume: str, *, other: bool) -> None:
    """A shadow lives, but the directory that it wrote is gone. Deleted on purpose or unmounted by accident:
    only the user knows. `other`: another run lies there now, which nothing can be adopted into."""
    if resume == "must" and not other:
        return
    without = f"to begin without it: everystep stop {run} --discard"
    back = "to go on: put the directory back (mount, mv)"
    adopt = (
        'move the other run away and attach with resume="must"'
        if other
        else 'adopt what the shadow holds with attach(resume="must")'
    )
    raise DirectoryLost(
        f"open run {run}: {lost}, but shadow {pid} of that run lives and holds its newest step",
        hint=f"{without}; {back}, or {adopt}",
    )


def refuse_steps(run: str, step: int | None, pid: int | None) -> None:
    """`resume="never"`: there must be nothing to go on from."""
    if pid is not None:
        raise RunHasSteps(
            f'attach {run}: resume="never", but shadow {pid} of this run lives',
            hint=f"everystep stop {run} --discard ends it; or give another run=",
        )
    if step is not None:
        raise RunHasSteps(
            f'attach {run}: resume="never", but the run has steps, the newest base is of step {step}',
            hint="give another run=, remove the directory, or resume",
        )


def nothing_found(run: str, resume: str) -> None:
    """`resume="must"`: there must be something to go on from."""
    if resume == "must":
        raise NothingToRecover(
            f'attach {run}: resume="must", but no shadow holds its state and there is no valid base',
            hint="check the path; everystep verify tells what is wrong with a run that is there",
        )

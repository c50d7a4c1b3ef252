"""`everystep stop`: end a shadow that waits for a trainer which does not come back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from everystep.cli import output
from everystep.errors import EverystepError, LaneTimeout, NotARun, RunBusy, UsageError
from everystep.lane.control import AskStop, ask
from everystep.lane.host import process_state
from everystep.lane.runtime import ShadowCard, is_alive, living_cards, living_trainer, remove_card
from everystep.process.retire import gone_within, retire
from everystep.recover.meet import hold_run, shadow_of
from everystep.store.bucket.tiers import locate
from everystep.store.home import known_run

_LEAVE_SECONDS = 60.0  # after its answer a shadow ships the rest to a bucket


def stop(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Stop the shadow of this run (directory or URL). Default: none, with --all.",
        ),
    ] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="End every shadow of this user whose trainer is gone."),
    ] = False,
    discard: Annotated[
        bool, typer.Option("--discard", help="End it at once and write nothing more.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(help="Wait this many seconds until the newest step is written. Default: 600."),
    ] = 600.0,
) -> output.Reply:
    """End the shadow of a run after it has written its newest step. Refused while its trainer lives."""
    _check(run, every, discard)
    if run is not None:
        shadows = [stop_run(locate(run)[0], discard=discard, timeout=timeout)]
    else:
        shadows = [_stop_or_tell(card, timeout) for card in living_cards()]
    code = output.PROBLEM if any(s["problem"] for s in shadows) else 0
    return output.Reply({"shadows": shadows}, lambda: _render(shadows), code)


def _check(run: str | None, every: bool, discard: bool) -> None:
    if (run is None) != every:
        raise UsageError("stop: give one run, or --all", hint="everystep stop RUN")
    if every and discard:
        raise UsageError(
            "stop: --all and --discard together could lose many steps",
            hint="discard by name: everystep stop RUN --discard",
        )


def stop_run(run: Path, *, discard: bool, timeout: float) -> dict[str, Any]:
    """Nobody attaches meanwhile; a trainer that lives is named and left alone."""
    folder, lock = hold_run(run, "stop")
    try:
        card = shadow_of(run, folder)
        if card is None and not known_run(run):
            raise NotARun(
                f"stop {run}: there is no run, and no shadow of one", hint="check the path"
            )
        if card is None:
            return _told(str(run), None, step=None, ended=False)
        step = None if discard else _write_and_leave(card, run, timeout)
        if discard:
            retire(card)
        remove_card(Path(card.descriptors).parent, card.pid)
        return _told(str(run), card.pid, step=step, ended=True)
    finally:
        lock.close()


def _write_and_leave(card: ShadowCard, run: Path, timeout: float) -> int | None:
    """The step that the store brings back once the shadow is gone."""
    try:
        answer = ask(card.control, AskStop(), timeout_seconds=timeout, alive=lambda: is_alive(card))
    except LaneTimeout as error:
        state = "is stopped" if process_state(card.pid) == "T" else "goes on"
        raise LaneTimeout(
            f"stop {run}: shadow {card.pid} has not written its newest step in {timeout:g} s; it {state}",
            hint="wait longer with --timeout, or give up what it holds with --discard",
        ) from error
    if answer.error:
        raise EverystepError(
            f"stop {run}: shadow {card.pid} cannot write its newest step: {answer.error}",
            hint="mend that and stop again, or give up what it holds with --discard",
        )
    if not gone_within(card, _LEAVE_SECONDS):
        raise LaneTimeout(
            f"stop {run}: shadow {card.pid} has written everything, but lives {_LEAVE_SECONDS:g} s later",
            hint=f"see shadow.log in {Path(card.descriptors).parent}; kill {card.pid} loses nothing",
        )
    step: int | None = answer.status.get("durable_step")
    return step


def _stop_or_tell(card: ShadowCard, timeout: float) -> dict[str, Any]:
    trainer = living_trainer(card)
    if trainer:
        return _told(card.run, card.pid, step=None, ended=False, trainer=trainer)
    try:
        return stop_run(Path(card.run), discard=False, timeout=timeout)
    except RunBusy:  # a trainer has come back for it just now
        return _told(card.run, card.pid, step=None, ended=False)
    except EverystepError as error:
        return _told(card.run, card.pid, step=None, ended=False, problem=str(error))


def _told(
    run: str,
    pid: int | None,
    *,
    step: int | None,
    ended: bool,
    trainer: int | None = None,
    problem: str = "",
) -> dict[str, Any]:
    return {
        "run": run,
        "pid": pid,
        "trainer_pid": trainer,
        "ended": ended,
        "durable_step": step,
        "problem": problem,
    }


def _render(shadows: list[dict[str, Any]]) -> Iterator[Any]:
    if not shadows:
        yield "no shadow of this user lives on this host"
    for told in shadows:
        yield f"{told['run']}: {_sentence(told)}"


def _sentence(told: dict[str, Any]) -> str:
    if told["problem"]:
        return f"problem: {told['problem']}"
    if told["pid"] is None:
        return "no shadow of this run lives on this host"
    if not told["ended"]:
        who = f"trainer {told['trainer_pid']}" if told["trainer_pid"] else "a new trainer"
        return f"shadow {told['pid']} stays, {who} uses it"
    step = told["durable_step"]
    left = "nothing more was written" if step is None else f"step {step} is durable"
    return f"shadow {told['pid']} has ended; {left}"

"""Loops of every shape: break, exceptions, bare loops, rewind, restore and reading without torch."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import everystep

from .compare import freeze, same
from .harness import SEED, Job, look, resume, seed_all, unbroken

ADAMW = partial(optim.AdamW, lr=0.01)


def simple(kind: Any = ADAMW) -> Job:
    model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.2), nn.Linear(4, 2))
    optimizer = kind(model.parameters())
    scheduler = optim.lr_scheduler.StepLR(optimizer, 2)

    def turn(step: int) -> Any:
        loss = model(torch.randn(4, 5)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.detach()

    return Job(model, optimizer, turn, {"scheduler": scheduler})


def started(run: Path, build: Any = simple) -> tuple[Job, everystep.Run]:
    seed_all(SEED)
    job = build()
    given = {"state": job.state, "every": 1, "on_lag": "wait", "on_failure": "raise"}
    return job, everystep.attach(job.model, job.optimizer, run=run, **given)


def test_break_seals_a_finished_step_and_an_exception_does_not(tmp_path: Path) -> None:
    end, losses, _ = unbroken(simple, 6)
    job, attached = started(tmp_path / "run")
    with attached as run:
        for step in run.steps(6):
            job.turn(step)
            if step == 1:
                break
    assert everystep.open_run(tmp_path / "run").steps[-1] == 2
    job = simple()
    with (
        pytest.raises(ZeroDivisionError),
        everystep.attach(
            job.model, job.optimizer, run=tmp_path / "run", every=1, state=job.state
        ) as run,
    ):
        for step in run.steps(6):
            job.turn(step)
            if step == 4:
                raise ZeroDivisionError
    outcome = resume(simple, tmp_path / "run", 6, seed=SEED + 1)
    assert (outcome.start, outcome.status["resumed_from"]) == (4, "shadow")
    same(losses, {**losses, **outcome.losses}, "losses")
    same(end, outcome.end, "end")


@pytest.mark.parametrize("again", [False, True])
def test_a_turn_counts_while_a_dead_shadow_is_replaced(tmp_path: Path, again: bool) -> None:
    """Nothing records it: the loop alone knows that `break` has finished it."""
    end, losses, _ = unbroken(simple, 6)
    seed_all(SEED)
    job, seen = simple(), {}
    with everystep.attach(
        job.model, job.optimizer, run=tmp_path / "run", every=1, state=job.state
    ) as run:
        for _ in range(2 if again else 1):
            for step in run.steps(6 if seen else 4):
                seen[step] = freeze(job.turn(step))
                if step == 2:
                    kill_shadow(run)
                if step == 3 and run.status()["mode"] == "not recording":
                    break
    outcome = resume(simple, tmp_path / "run", 6, seed=SEED + 1)
    assert outcome.start == (6 if again else 4)
    same(losses, {**seen, **outcome.losses}, "losses")
    same(end, outcome.end, "end")


def test_close_replaces_a_shadow_that_died_after_the_last_step(tmp_path: Path) -> None:
    end, _, _ = unbroken(simple, 3)
    seed_all(SEED)
    job = simple()
    with everystep.attach(
        job.model, job.optimizer, run=tmp_path / "run", every=1, state=job.state
    ) as run:
        for step in run.steps(3):
            job.turn(step)
        kill_shadow(run)
    outcome = resume(simple, tmp_path / "run", 3, seed=SEED + 1)
    assert outcome.start == 3
    same(end, outcome.end, "end")


def test_close_does_not_record_a_broken_turn_under_the_step_before(tmp_path: Path) -> None:
    """The shadow that replaces a dead one is ready, and nobody has looked at it yet."""
    end, losses, _ = unbroken(simple, 5)
    seed_all(SEED)
    job, seen = simple(), {}
    run = everystep.attach(job.model, job.optimizer, run=tmp_path / "run", every=1, state=job.state)
    with contextlib.suppress(ZeroDivisionError):
        for step in run.steps(5):
            if step == 1:
                run.flush(60)
                kill_shadow(run)
            if step == 3:
                run._recorder.link.starter.wait()
            seen[step] = freeze(job.turn(step))
            if step == 3:
                raise ZeroDivisionError
    with pytest.warns(UserWarning, match="step 3 is not recorded"):
        run.close()
    outcome = resume(simple, tmp_path / "run", 5, seed=SEED + 1)
    assert outcome.start <= 3
    same(losses, {**losses, **outcome.losses}, "losses")
    same(end, outcome.end, "end")


def test_a_loop_inside_another_iterator_is_sealed_at_its_end(tmp_path: Path) -> None:
    job, run = started(tmp_path / "run")
    for step in itertools.islice(run.steps(100), 3):
        job.turn(step)
    run.close()
    assert everystep.open_run(tmp_path / "run").steps[-1] == 3


def test_flush_in_a_turn_that_adds_a_group(tmp_path: Path) -> None:
    job, run = started(tmp_path / "run", partial(growing, []))
    for step in run.steps(3):
        job.turn(step)
        assert run.flush(60) == step
    run.close()


def test_a_rewind_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    job, run = started(tmp_path / "run", partial(growing, []))
    for step in run.steps(3):
        if step == 0:
            run.flush(60)
        job.turn(step)
        if step == 2:
            job.model.append(nn.Linear(2, 2))
            with pytest.raises(everystep.EverystepError, match="in the model, not in the run"):
                run.rewind(0)
            assert len(job.optimizer.param_groups) == 2
            del job.model[-1]
    run.close()


def kill_shadow(run: everystep.Run) -> None:
    pid = run.status()["pid"]
    os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        time.sleep(0.01)


def test_a_turn_that_an_exception_left_is_not_sealed_by_close(tmp_path: Path) -> None:
    end, losses, _ = unbroken(simple, 6)
    job, run = started(tmp_path / "run")
    with contextlib.suppress(ZeroDivisionError):
        for step in run.steps(6):
            job.turn(step)
            if step == 3:
                raise ZeroDivisionError
    run.close()
    outcome = resume(simple, tmp_path / "run", 6, seed=SEED + 1)
    assert outcome.start == 3
    same(losses, {**losses, **outcome.losses}, "losses")
    same(end, outcome.end, "end")


def growing(raises: list[int]) -> Job:
    """Adds a param group at a step, and may raise behind it."""
    job = simple(partial(optim.SGD, lr=0.1))
    later, turn = job.optimizer.param_groups[0]["params"].pop(), job.turn

    def grow_and_turn(step: int) -> Any:
        if step == 1:
            job.optimizer.add_param_group({"params": [later], "lr": 0.2})
        loss = turn(step)
        if step in raises:
            raises.clear()
            raise ZeroDivisionError
        return loss

    job.turn = grow_and_turn
    return job


def test_a_param_group_that_a_broken_turn_added_is_taken_back(tmp_path: Path) -> None:
    end, losses, _ = unbroken(partial(growing, []), 3)
    job, run = started(tmp_path / "run", partial(growing, [1]))
    seen = {}
    for _ in range(2):
        with contextlib.suppress(ZeroDivisionError):
            for step in run.steps(3):
                seen[step] = freeze(job.turn(step))
    run.close()
    same(losses, seen, "losses")
    same(end, look(job), "end")


def test_a_group_may_be_added_while_a_dead_shadow_is_replaced(tmp_path: Path) -> None:
    """The new one was started for the groups of before."""
    end, losses, _ = unbroken(partial(growing, []), 5)
    seed_all(SEED)
    job, seen = growing([]), {}
    with everystep.attach(
        job.model, job.optimizer, run=tmp_path / "run", every=1, state=job.state
    ) as run:
        for step in run.steps(3):
            if step == 0:
                kill_shadow(run)
            seen[step] = freeze(job.turn(step))
    outcome = resume(partial(growing, []), tmp_path / "run", 5, seed=SEED + 1)
    assert outcome.start == 3
    same(losses, {**seen, **outcome.losses}, "losses")
    same(end, outcome.end, "end")


def remembering(raises: list[int]) -> Job:
    """Its user state outgrows what a new script has, soon and by far; it may raise in the midst of a turn."""
    job = simple()
    seen: dict[str, list[bytes]] = {"seen": []}
    job.state["seen"], turn = seen, job.turn

    def turn_and_remember(step: int) -> Any:
        if step in raises:
            raises.clear()
            torch.randn(1)
            raise ZeroDivisionError
        seen["seen"].append(bytes([step]) * 200_000)
        return turn(step)

    job.turn = turn_and_remember
    return job


def test_the_first_turn_is_taken_back_where_user_state_has_grown(tmp_path: Path) -> None:
    """The shadow that a resume starts has room for what was loaded, not only for what the script brings."""
    end, losses, _ = unbroken(partial(remembering, []), 5)
    job, first = started(tmp_path / "run", partial(remembering, []))
    with first as run:
        for step in run.steps(3):
            job.turn(step)
    job, second = started(tmp_path / "run", partial(remembering, [3]))
    seen = {}
    with second as run:
        for _ in range(2):
            with contextlib.suppress(ZeroDivisionError):
                for step in run.steps(5):
                    seen[step] = freeze(job.turn(step))
    same(losses, {**losses, **seen}, "losses")
    assert sorted(seen) == [3, 4]
    same(end, look(job), "end")


def test_rewind_takes_a_param_group_back_that_was_added_since(tmp_path: Path) -> None:
    end, losses, _ = unbroken(partial(growing, []), 3)
    job, run = started(tmp_path / "run", partial(growing, []))
    seen, rewound = {}, False
    for step in run.steps(3):
        if step == 0:
            run.flush(60)
        if step == 2 and not rewound:
            rewound = run.rewind(0) == 0
            continue
        seen[step] = freeze(job.turn(step))
    run.close()
    same(losses, seen, "losses")
    same(end, look(job), "end")


def test_a_group_that_shrank_before_the_first_step_can_be_closed(tmp_path: Path) -> None:
    job, run = started(tmp_path / "run")
    job.optimizer.param_groups[0]["params"].pop()
    run.close()
    assert everystep.open_run(tmp_path / "run").steps == [0]


def test_break_and_again_while_it_is_disabled(tmp_path: Path) -> None:
    job, seen = simple(), []
    run = everystep.attach(job.model, job.optimizer, run=tmp_path / "run", enabled=False)
    for _ in range(2):
        for step in run.steps(3):
            seen.append(step)
            if step == 1:
                break
    assert seen == [0, 1, 2]


def test_break_before_anything_happened_seals_nothing(tmp_path: Path) -> None:
    job, attached = started(tmp_path / "run")
    with attached as run:
        for step in run.steps(6):
            if step == 2:
                break
            job.turn(step)
    assert everystep.open_run(tmp_path / "run").steps[-1] == 2


def test_break_and_a_loop_again_goes_on_behind_it(tmp_path: Path) -> None:
    end, losses, _ = unbroken(simple, 6)
    job, attached = started(tmp_path / "run")
    found = {}
    with attached as run:
        for until in (1, 3, 9):
            for step in run.steps(6):
                found[step] = freeze(job.turn(step))
                if step == until:
                    break
        same(losses, found, "losses")
        same(end, look(job), "end")
    assert list(found) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_turn_that_an_exception_left_is_taken_back(tmp_path: Path, error: Any) -> None:
    """As when a cell of a notebook is interrupted behind `optimizer.step()` and run again."""
    end, losses, _ = unbroken(simple, 6)
    job, attached = started(tmp_path / "run")
    found = {}
    with attached as run:
        for fails_at in (2, 4, 9):
            with contextlib.suppress(error):
                for step in run.steps(6):
                    found[step] = freeze(job.turn(step))
                    if step == fails_at:
                        raise error
        same(losses, found, "losses")
        same(end, look(job), "end")
    outcome = resume(simple, tmp_path / "run", 6, seed=SEED + 1)
    same(end, outcome.end, "resumed")


def with_later_group(leaves: frozenset[int] = frozenset()) -> Job:
    """The bias joins the optimizer at step 2. Each step of `leaves` is left once, by an exception before
    gradients are cleared."""
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    optimizer = optim.SGD([model.weight], lr=0.1)
    left = set(leaves)

    def turn(step: int) -> Any:
        model.bias.requires_grad_(step >= 2)
        if step == 2:
            optimizer.add_param_group({"params": [model.bias], "lr": 0.05})
        loss = model(torch.randn(5, 4)).square().mean()
        loss.backward()
        optimizer.step()
        if step in left:
            left.remove(step)
            raise KeyboardInterrupt
        optimizer.zero_grad()
        return loss.detach()

    return Job(model, optimizer, turn)


def test_a_turn_that_is_taken_back_leaves_no_gradient_on_a_group_it_added(tmp_path: Path) -> None:
    """Else the turn that is done again would add to it."""
    end, losses, _ = unbroken(with_later_group, 4)
    job, attached = started(tmp_path / "run", partial(with_later_group, frozenset({2})))
    found = {}
    with attached as run:
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt):
                for step in run.steps(4):
                    found[step] = freeze(job.turn(step))
        same(losses, found, "losses")
        same(end, look(job), "end")


def test_a_bare_loop_that_was_interrupted_begins_its_turn_again(tmp_path: Path) -> None:
    end, losses, _ = unbroken(simple, 4)
    job, run = started(tmp_path / "run")
    found = {}
    for fails_at in (2, 9):
        with contextlib.suppress(KeyboardInterrupt):
            for step in range(run.resume(), 4):
                found[step] = freeze(job.turn(step))
                if step == fails_at:
                    raise KeyboardInterrupt
                run.seal()
    same(losses, found, "losses")
    same(end, look(job), "end")
    run.close()


@pytest.mark.parametrize("flushes", [False, True])
def test_a_loop_that_never_restores_random_states_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flushes: bool
) -> None:
    for _ in range(2):
        job, run = started(tmp_path / "run")
        assert "run.resume()" not in caplog.text
        for step in range(run.step, run.step + 2):
            if flushes:
                run.flush(60)
            job.turn(step)
            run.seal()
        run.close()
    assert caplog.text.count("never called run.resume()") == 1


def test_bare_loop_with_resume_and_seal(tmp_path: Path) -> None:
    end, losses, _ = unbroken(simple, 6)
    found = {}
    for number, until in enumerate((3, 6)):
        seed_all(SEED + number)
        job = simple()
        run = everystep.attach(
            job.model,
            job.optimizer,
            run=tmp_path / "run",
            every=1,
            state=job.state,
            on_failure="raise",
        )
        if number:
            torch.rand(7)  # as making an iterator does; resume() puts the generator right
        for step in range(run.resume(), until):
            found[step] = freeze(job.turn(step))
            run.seal()
        seen = look(job)
        run.close()
    same(losses, found, "losses")
    same(end, seen, "end")


@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
def test_rewind_goes_the_same_way_again(tmp_path: Path, kind: str) -> None:
    job, attached = started(
        tmp_path / "run", partial(simple, partial(getattr(optim, kind), lr=0.1))
    )
    with attached as run:
        run.resume()
        seen = {}
        for step in range(6):
            if step == 3:
                run.flush(60)
            seen[step] = freeze(job.turn(step))
            run.seal()
        end = look(job)
        run.flush(60)
        assert run.rewind(3) == run.step == 3
        again = {}
        for step in run.steps(6):
            again[step] = freeze(job.turn(step))
        same(end, look(job), "end")
        same(seen, {**seen, **again}, "losses")
        assert sorted(again) == [3, 4, 5]
    outcome = resume(
        partial(simple, partial(getattr(optim, kind), lr=0.1)), tmp_path / "run", 6, seed=1
    )
    same(end, outcome.end, "resumed")


def test_rewind_inside_the_loop_goes_on_from_there(tmp_path: Path) -> None:
    end, losses, _ = unbroken(simple, 6)
    job, attached = started(tmp_path / "run")
    turns, found, rewound = [], {}, False
    with attached as run:
        for step in run.steps(6):
            turns.append(step)
            if step == 2 and not rewound:
                run.flush(60)
            if step == 4 and not rewound:
                rewound = True
                run.rewind(2)
                continue
            found[step] = freeze(job.turn(step))
        assert turns == [0, 1, 2, 3, 4, 2, 3, 4, 5]
        same(losses, found, "losses")
        same(end, look(job), "end")


@pytest.mark.timeout(60)
def test_rewind_then_close_stays_rewound(tmp_path: Path) -> None:
    """Neither the shadow nor the newer base of before the rewind may win at the next attach."""
    job, attached = started(tmp_path / "run")
    with attached as run:
        run.resume()
        for step in range(4):
            if step == 2:
                run.flush(60)
                there = look(job)
            job.turn(step)
            run.seal()
        run.flush(60)
        run.rewind(2)
    job = simple()
    with everystep.attach(
        job.model, job.optimizer, run=tmp_path / "run", every=1, state=job.state
    ) as run:
        assert run.resume() == 2
        same(there, look(job), "rewound")


def test_restore_of_a_retained_step(tmp_path: Path) -> None:
    job, attached = started(tmp_path / "run")
    at: dict[int, Any] = {}
    with attached as run:
        for step in run.steps(4):
            if step in (1, 3):
                at[step] = look(job, whole=False)
                run.flush(60)
            job.turn(step)
        at[4] = look(job, whole=False)
    for step in (1, 3, 4):
        seed_all(SEED + step)
        other = simple()
        assert everystep.restore(tmp_path / "run", other.model, other.optimizer, step=step) == step
        same(at[step]["models"], look(other)["models"], f"models at {step}")
        same(at[step]["optimizers"], look(other)["optimizers"], f"optimizers at {step}")
    bare = simple()
    assert everystep.restore(tmp_path / "run", bare.model) == 4
    same(at[4]["models"], look(bare)["models"], "weights alone")


def test_reading_without_torch_gives_the_same_bytes(tmp_path: Path) -> None:
    seed_all(SEED)
    models = {"a": nn.Linear(3, 2), "b": nn.BatchNorm1d(2).to(torch.bfloat16)}
    optimizers = {k: optim.AdamW(m.parameters(), lr=0.1) for k, m in models.items()}
    with everystep.attach(
        models, optimizers, run=tmp_path / "run", every=1, state={"n": {"x": 1}}
    ) as run:
        for _ in run.steps(2):
            loss = models["b"](models["a"](torch.randn(4, 3)).bfloat16()).square().mean()
            loss.backward()
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
    expected = {}
    for key, model in models.items():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            expected[f"{key}.{name}"] = freeze(tensor)[2:]
            for slot, value in optimizers[key].state.get(tensor, {}).items():
                expected[f"{key}.{name}:{key}/{slot}"] = freeze(value)[2:]
    stored = everystep.open_run(tmp_path / "run")
    assert stored.steps[-1] == 2 and stored.state() == {"n": {"x": 1}}
    found = {name: (array.shape, array.tobytes()) for name, array in stored.tensors().items()}
    assert found == expected

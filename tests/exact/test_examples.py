"""The programs in examples/, as they stand: killed or interrupted in mid-run and started again, each ends
with the bits of a run that was never broken."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import re
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep

from .compare import same
from .harness import Job, look, seed_all

EXAMPLES = Path(__file__).parents[2] / "examples"
LINES_MAX = 100
_SECONDS = 120
SEED = int(os.environ.get("EVERYSTEP_SEED", random.SystemRandom().randrange(1 << 30)))
chance = random.Random(SEED)
_forks = multiprocessing.get_context("forkserver")


def pieces_of(program: Path) -> list[Callable[[], Any]]:
    """What a person starts one after the other: the cells of a notebook, or a script."""
    if program.suffix == ".py":
        return [partial(runpy.run_path, str(program), run_name="__main__")]
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = json.loads(program.read_text())["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return [partial(exec, code, names) for code in codes]


def go_on(pieces: list[Callable[[], Any]], number: int) -> None:
    """Run the cell again. If it was left in the midst of a seal, an error says what to do: attach again."""
    try:
        pieces[number]()
    except everystep.EverystepError as error:
        assert "attach again" in str(error)
        for piece in pieces[1 : number + 1]:
            piece()


def strike(run: everystep.Run, step: int, delay: float, number: int) -> None:
    """From a thread, as a person or a machine does: anywhere in the step that is under way then."""
    while run.step < step:
        time.sleep(0.001)
    time.sleep(delay)
    os.kill(os.getpid(), number)


def play(program: Path, folder: Path, variables: dict[str, str], *blow: Any) -> None:
    """In a process of its own: run a program in its folder, and write down how everything ended."""
    # a shell that starts tests in the background lets them ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.update(variables)
    for stream in (1, 2):
        os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    torch.set_num_threads(1)
    seed_all(int(Path("runs").exists()))  # whoever starts again has other random states at first
    sys.argv = [str(program)]
    plain, jobs = everystep.attach, []

    def attach(model: Any, optimizer: Any, **options: Any) -> everystep.Run:
        run = plain(model, optimizer, **options)
        jobs.append(Job(model, optimizer, lambda _: None, options.get("state", {})))
        if blow and len(jobs) == 1:
            threading.Thread(target=strike, args=(run, *blow), daemon=True).start()
        return run

    everystep.attach = attach
    pieces = pieces_of(program)
    for number, piece in enumerate(pieces):
        try:
            piece()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            go_on(pieces, number)
    Path("end").write_bytes(pickle.dumps(look(jobs[-1])))


def run_in(folder: Path, program: str, *blow: Any, **variables: str) -> int:
    """How it ended, as subprocess does; what it said and what it ended with lie in the folder."""
    folder.mkdir(exist_ok=True)
    variables["EVERYSTEP_RUNTIME_DIR"] = os.environ["EVERYSTEP_RUNTIME_DIR"]
    child = _forks.Process(target=play, args=(EXAMPLES / program, folder, variables, *blow))
    child.start()
    child.join(_SECONDS)
    if child.exitcode is None:
        child.kill()
        child.join()
    assert child.exitcode is not None
    return child.exitcode


def said(folder: Path) -> str:
    return (folder / "said").read_text()


def blow(total: int, number: int) -> tuple[int, float, int]:
    """At which step to strike, how long after it began, and with what."""
    step, delay = chance.randint(total // 5, 4 * total // 5), chance.uniform(0, 0.01)
    print(f"EVERYSTEP_SEED={SEED}: signal {number} {delay:.4f} s into step {step}")
    return step, delay, number


def check_end(folder: Path, expected: Path) -> None:
    """The same weights, optimizer, state and random states, and the same last line."""
    ends = [pickle.loads((place / "end").read_bytes()) for place in (expected, folder)]
    same(ends[0], ends[1], "the end")
    printed = [re.findall(r"^step.*", said(place), re.M)[-1] for place in (expected, folder)]
    assert printed[0] == printed[1]


def kill_and_start_again(program: str, folder: Path, total: int) -> None:
    assert run_in(folder, program, *blow(total, signal.SIGKILL)) == -signal.SIGKILL, said(folder)
    assert run_in(folder, program) == 0, said(folder)
    resumed = re.search(r"^everystep: resumed \S+ at step (\d+)", said(folder), re.M)
    assert resumed and total // 5 <= int(resumed[1]) < total, said(folder)


@pytest.mark.parametrize(("program", "total"), [("nanogpt", 100), ("gan", 300), ("lora", 60)])
def test_a_script_is_killed_and_started_again(program: str, total: int, tmp_path: Path) -> None:
    name, unbroken, killed = f"{program}.py", tmp_path / "unbroken", tmp_path / "killed"
    assert run_in(unbroken, name, EVERYSTEP_DISABLE="1") == 0, said(unbroken)
    kill_and_start_again(name, killed, total)
    check_end(killed, unbroken)


def test_a_notebook_is_interrupted_and_its_kernel_killed(tmp_path: Path) -> None:
    name, total = "notebook.ipynb", 200
    unbroken, interrupted, killed = (tmp_path / n for n in ("unbroken", "interrupted", "killed"))
    assert run_in(unbroken, name) == 0, said(unbroken)
    assert run_in(interrupted, name, *blow(total, signal.SIGINT)) == 0, said(interrupted)
    assert "interrupted\n" in said(interrupted), said(interrupted)
    kill_and_start_again(name, killed, total)
    for folder in (interrupted, killed):
        check_end(folder, unbroken)


def test_programs_are_short_enough_to_read() -> None:
    lines = {path.name: path.read_text().count("\n") for path in EXAMPLES.glob("*.py")}
    assert lines and max(lines.values()) <= LINES_MAX, lines


def test_who_has_no_peft_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SystemExit, match="pip install peft"):
        runpy.run_path(str(EXAMPLES / "lora.py"), run_name="__main__")

"""README's examples as they stand: the first with names that it leaves to the reader and nothing else, the
quick start as a file of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader

README = Path(__file__).parents[2] / "README.md"
EPOCH, END = 5, 13  # batches of a data epoch; the last step ends in the third
KILL_AFTER_LINES = 7  # that the quick start prints, of 20


def examples() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)


class Enough(Exception):
    pass


def stand_ins(seen: list[Any], until: int) -> dict[str, Any]:
    """What the example does not define. Ends the training when `until` batches were seen."""
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = optim.AdamW(model.parameters(), lr=0.01)

    def train_one(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if len(seen) == until:
            raise Enough
        loss = model(batch).square().mean()
        seen.append((batch.flatten().tolist(), loss.item()))
        return loss

    return {
        "model": model,
        "optimizer": optimizer,
        "sched": optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
        "loader": DataLoader(torch.arange(20.0).view(20, 1), batch_size=4, shuffle=True),  # type: ignore[arg-type]
        "train_one": train_one,
    }


def plain_loop(names: dict[str, Any]) -> None:
    while True:
        for batch in names["loader"]:
            names["train_one"](names["model"], batch).backward()
            names["optimizer"].step()
            names["optimizer"].zero_grad()
            names["sched"].step()


def test_first_example_runs_over_data_epochs_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = examples()[0]
    assert "everystep.attach" in example
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(11)
    expected: list[Any] = []
    with pytest.raises(Enough):
        plain_loop(stand_ins(expected, END))
    seen: list[Any] = []
    for life, until in enumerate((EPOCH + 2, END)):
        torch.manual_seed(11 + life)
        with pytest.raises(Enough):
            exec(example, stand_ins(seen, until))
    assert seen == expected
    assert any("runs/gpt" in str(path) for path in tmp_path.rglob("*"))


def run_quick_start(folder: Path, *, kill: bool = False) -> tuple[list[str], str]:
    """Lines that it printed, and what it said on stderr."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(examples()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment.pop("EVERYSTEP_QUIET", None)
    with subprocess.Popen(
        [sys.executable, "train.py"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if kill and len(lines) == KILL_AFTER_LINES:
                process.kill()
        told = process.stderr.read()
    assert (process.returncode == 0) is not kill, told
    return lines, told


def test_quick_start_survives_a_kill_and_prints_the_same_losses(tmp_path: Path) -> None:
    assert examples()[1].startswith("# train.py\n")
    expected, _ = run_quick_start(tmp_path / "unbroken")
    assert len(expected) == 20 and len(set(expected)) == 20
    before, _ = run_quick_start(tmp_path / "killed", kill=True)
    after, told = run_quick_start(tmp_path / "killed")
    assert before == expected[: len(before)]
    assert after == expected[-len(after) :]
    # the step whose loss was printed last may not have been sealed: then it is printed again
    assert len(before) + len(after) in (20, 21)
    assert re.search(r"resumed \S+/runs/first at step \d+ from the shadow \(exact\)", told)

"""README's first example as it stands, with names that it leaves to the reader and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader

README = Path(__file__).parents[2] / "README.md"
EPOCH, END = 5, 13  # batches of a data epoch; the last step ends in the third


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
    example = re.search(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)
    assert example and "everystep.attach" in example[1]
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(11)
    expected: list[Any] = []
    with pytest.raises(Enough):
        plain_loop(stand_ins(expected, END))
    seen: list[Any] = []
    for life, until in enumerate((EPOCH + 2, END)):
        torch.manual_seed(11 + life)
        with pytest.raises(Enough):
            exec(example[1], stand_ins(seen, until))
    assert seen == expected
    assert any("runs/gpt" in str(path) for path in tmp_path.rglob("*"))

"""A LoRA-style run: what did not change is referred to, not written again, also after a resume."""

from __future__ import annotations

from pathlib import Path

import torch

import everystep

FROZEN_BYTES = 4 * 600 * 600


class Adapted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(600, 600, bias=False).requires_grad_(False)
        self.down = torch.nn.Linear(600, 6, bias=False)
        self.up = torch.nn.Linear(6, 600, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


def train(run_path: Path, flush_at: tuple[int, ...], total: int) -> Adapted:
    torch.manual_seed(3)
    model = Adapted()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable)
    with everystep.attach(model, optimizer, run=run_path, keep=everystep.Keep(last=2)) as run:
        for step in run.steps(total):
            if step in flush_at:
                run.flush()
            model(torch.randn(8, 600)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def new_bytes(run_path: Path) -> dict[int, int]:
    return {base.entry.step: base.entry.new_bytes for base in everystep.open_run(run_path).bases}


def test_only_adapters_are_written_after_the_first_base(tmp_path: Path) -> None:
    model = train(tmp_path / "run", (4, 8), 12)
    written = new_bytes(tmp_path / "run")
    share = sum(p.numel() for p in model.parameters() if p.requires_grad) / (600 * 600)
    assert share < 0.021
    assert written and all(size < FROZEN_BYTES / 4 for size in written.values()), written
    tensors = everystep.open_run(tmp_path / "run").tensors()
    for name, value in model.state_dict().items():
        assert tensors[name].tobytes() == value.numpy().tobytes()


def test_a_resumed_run_does_not_write_the_frozen_part_again(tmp_path: Path) -> None:
    train(tmp_path / "run", (), 4)
    model = train(tmp_path / "run", (6,), 9)
    assert all(
        size < FROZEN_BYTES / 4 for step, size in new_bytes(tmp_path / "run").items() if step > 4
    )
    assert everystep.open_run(tmp_path / "run").verify().problems == []
    fresh = Adapted()
    assert everystep.restore(tmp_path / "run", fresh) == 9
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)

"""On the device: every optimizer that has twins has an equal one, and a training's replica is equal too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everystep
from everystep import native
from everystep.replay.table import check_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(native.library() is None, reason="the twins were not compiled"),
]


def test_every_row_of_the_table_is_exact() -> None:
    rows = [row for row in check_all(1 << 16, 12)["rows"] if row["device"] == "cuda"]
    assert len(rows) == 42
    assert [row for row in rows if row["differing"]] == []


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    "settings", [{"fused": True}, {"foreach": True}, {"foreach": False, "fused": False}]
)
def test_a_training_with_clipping_and_a_schedule(
    settings: dict[str, Any], scaled: bool, tmp_path: Path
) -> None:
    """`scaled`: a GradScaler, whose scale is so large at first that steps are skipped."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 1023), nn.GELU(), nn.Linear(1023, 7)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **settings)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, enabled=scaled)
    state = {"schedule": schedule, "scaler": scaler}
    with everystep.attach(
        model,
        optimizer,
        run=tmp_path / "run",
        every=1,
        state=state,
        on_lag="wait",
        on_failure="raise",
    ) as run:
        for _ in run.steps(60):
            with torch.autocast("cuda", torch.float16):
                loss = model(torch.randn(32, 64, device="cuda")).square().mean()
            scaler.scale(loss).backward()
            if not scaled:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
        status = run.status()
        expected = [tensor.clone() for tensor in state_of(model, optimizer)]
    assert status["exactness"] == "exact" and status["rebases"] == 0
    for tensor in state_of(model, optimizer):
        tensor.zero_()
    assert everystep.restore(run.path, model, optimizer) == 60
    for number, (a, b) in enumerate(zip(expected, state_of(model, optimizer), strict=True)):
        assert torch.equal(a.cpu(), b.cpu()), f"tensor {number} differs"


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    slots = (t for s in optimizer.state.values() for _, t in sorted(s.items()))
    return [*(p.detach() for p in model.parameters()), *slots]

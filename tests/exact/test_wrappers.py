"""What frameworks wrap is recorded as if it was not wrapped; an optimizer inside another one is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import everystep
from everystep.capture.census import take_census
from everystep.capture.state import UserState
from everystep.errors import UsageError

from .harness import Job, check

ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(5))


def accelerated() -> Job:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    bare = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    adamw = optim.AdamW(bare.parameters(), lr=0.01)
    cosine = optim.lr_scheduler.CosineAnnealingLR(adamw, 20)
    shuffled: Any = DataLoader(TensorDataset(ROWS), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(bare, adamw, shuffled, cosine)
    batches = everystep.data(loader)

    def turn(step: int) -> Any:
        """Two batches, one call of the optimizer inside."""
        losses = []
        for _ in range(2):
            (rows,) = next(batches)
            with accelerator.accumulate(model):
                loss = model(rows).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append((loss.detach(), scheduler.get_last_lr(), batches.epoch))
        return losses

    return Job(model, optimizer, turn, {"scheduler": scheduler, "data": batches})


def test_what_accelerate_prepared_resumes_bit_for_bit(tmp_path: Path) -> None:
    """A data epoch has three steps: it dies in the second one."""
    pytest.importorskip("accelerate")
    check(accelerated, tmp_path, total=8, die_at=(4,))


def test_a_prepared_loader_without_state_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    job = accelerated()
    loader = job.state["data"].loader
    with pytest.raises(UsageError, match=r"everystep\.data\(loader\)"):
        everystep.attach(
            job.model, job.optimizer, run=tmp_path / "run", every=1, state={"data": loader}
        )


def framework(name: str, module: str, inside: str, base: type = object) -> Any:
    """A class as a framework has it that is not installed here."""
    return type(
        name, (base,), {"__module__": module, "__init__": lambda s, o: vars(s).update({inside: o})}
    )


def test_every_known_wrapper_is_taken_off() -> None:
    net = nn.Linear(2, 2)
    sgd = optim.SGD(net.parameters(), lr=0.1)
    scheduler = optim.lr_scheduler.StepLR(sgd, 2)
    lightning = framework("LightningOptimizer", "lightning.pytorch.core.optimizer", "_optimizer")
    derived = type("LightningSGD", (lightning, optim.SGD), {"__init__": lightning.__init__})
    fabric = framework("_FabricOptimizer", "lightning_fabric.wrappers", "_optimizer")
    accelerate = framework(
        "AcceleratedOptimizer", "accelerate.optimizer", "optimizer", optim.Optimizer
    )
    for wrapped in (
        lightning(sgd),
        derived(sgd),
        fabric(sgd),
        accelerate(sgd),
        accelerate(fabric(sgd)),
    ):
        (spec,) = take_census(net, wrapped).census.optimizers
        assert spec.path == "torch.optim.sgd:SGD"
        assert take_census(net, {"a": wrapped}).optimizers == [sgd]
    module = framework("_FabricModule", "lightning_fabric.wrappers", "_original_module", nn.Module)
    assert [a.name for a in take_census(module(net), sgd).census.atoms] == ["weight", "bias"]
    assert take_census({"a": module(net)}, sgd).models == (net,)
    everystep.compress(accelerate(sgd), "bf16")
    assert len(sgd._optimizer_step_pre_hooks) == 1
    later = framework("AcceleratedScheduler", "accelerate.scheduler", "scheduler")
    assert UserState({"s": later(scheduler)}).members == {"s": scheduler}


class Lookahead(optim.Optimizer):
    """As several packages have it: slow weights in its own state, another optimizer inside."""

    def __init__(self, base: optim.Optimizer, where: str) -> None:
        super().__init__(base.param_groups, {})
        held: dict[str, Any] = {"plain": base, "list": [base], "dict": {"fast": base}}
        self.inner = held[where]


@pytest.mark.parametrize(
    ("where", "reached"), [("plain", ".inner"), ("list", ".inner[0]"), ("dict", ".inner['fast']")]
)
def test_an_optimizer_inside_that_was_not_given_is_refused(
    where: str, reached: str, tmp_path: Path
) -> None:
    net = nn.Linear(2, 2)
    base = optim.Adam(net.parameters())
    outer = Lookahead(base, where)
    with pytest.raises(UsageError) as refusal:
        everystep.attach(net, outer, run=tmp_path / "run", every=1)
    told = str(refusal.value)
    assert "Lookahead" in told and "torch.optim.adam.Adam" in told and reached in told
    assert "give both, as a dict" in told
    assert len(take_census(net, {"outer": outer, "inner": base}).optimizers) == 2
    assert not (tmp_path / "run").exists()


def test_what_is_no_optimizer_is_refused_with_what_it_holds() -> None:
    net = nn.Linear(2, 2)
    unknown = framework("LARC", "apex.parallel", "optim")(optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(
        UsageError, match=r"is a apex\.parallel\.LARC[\s\S]*torch\.optim\.sgd\.SGD in \.optim"
    ):
        take_census(net, unknown)
    with pytest.raises(UsageError, match=r"is a builtins\.str, expected"):
        take_census(net, "sgd")  # type: ignore[arg-type]

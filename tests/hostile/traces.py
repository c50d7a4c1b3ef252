"""What a refused call may not leave behind: a shadow, a lock, a changed byte in the run's directory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn


def model(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, width))


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=1e-2)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    """Its steps are replayed without torch: a shadow is quick to start."""
    return torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)


def train_step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.randn(4, net[0].in_features)).square().mean().backward()  # type: ignore[index,operator]
    optimizer.step()
    optimizer.zero_grad()


def bits(net: nn.Module) -> dict[str, bytes]:
    return {name: t.detach().numpy().tobytes() for name, t in net.state_dict().items()}


def shadows(runtime: Path) -> list[int]:
    mine = f"EVERYSTEP_RUNTIME_DIR={runtime}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"everystep.shadow" in words and mine in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def locked(runtime: Path) -> list[str]:
    """Locks on trainer.lock files below, as the kernel lists them."""
    inodes = {str(path.stat().st_ino) for path in runtime.rglob("trainer.lock")}
    lines = Path("/proc/locks").read_text().splitlines()
    return [line for line in lines if line.split()[-3].split(":")[-1] in inodes]


def listing(path: Path) -> Any:
    """Every name and byte below a path, or of a file."""
    if not path.is_dir():
        return path.read_bytes() if path.exists() else None
    return {
        str(p.relative_to(path)): (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else None)
        for p in sorted(path.rglob("*"))
    }


@contextlib.contextmanager
def leaves_nothing(runtime: Path, path: Path, net: nn.Module | None = None) -> Iterator[None]:
    """Around a refusal: afterwards everything is as it was before."""
    before, weights = listing(path), bits(net) if net is not None else None
    yield
    assert shadows(runtime) == [], "a shadow was left behind"
    assert locked(runtime) == [], "a lock was left behind"
    assert listing(path) == before, "the run's directory was changed"
    if net is not None:
        assert bits(net) == weights, "the model was changed"

"""Ways to checkpoint the same training: ours, and the peers that are installed."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.torch_version import TorchVersion

import everystep
from everystep.bench.gpt import Training
from everystep.options import Tuning

_LAG_MAX = 8  # records that one pass replays together


class Method(Protocol):
    """Made for one window of steps."""

    def after_step(self, step: int) -> None: ...

    def warm_up_ended(self) -> bool:
        """Whether it does now what it does in the long run."""

    def close(self) -> dict[str, Any]:
        """Wait until everything is saved; figures of its own."""


class Nothing:
    def __init__(self, training: Training, folder: Path, every: int) -> None:
        pass

    def after_step(self, step: int) -> None:
        pass

    def warm_up_ended(self) -> bool:
        return True

    def close(self) -> dict[str, Any]:
        return {}


class Everystep(Nothing):
    """Recording at every step; `every` beyond 1 takes bases without a log."""

    def __init__(self, training: Training, folder: Path, every: int, **options: Any) -> None:
        given = {"durable_every": "1h", "on_failure": "raise", "every": every, **options}
        self._run = everystep.attach(
            training.model, training.optimizer, run=folder / "run", **given
        )
        self._run.resume()
        self._before: dict[str, Any] = {}

    def after_step(self, step: int) -> None:
        self._run.seal()

    def warm_up_ended(self) -> bool:
        self._before = self._run.status()
        in_step = self._before.get("lag_steps") in range(_LAG_MAX + 1)
        return bool(self._before.get("warm")) and in_step and self._before["mode"] == "every step"

    def close(self) -> dict[str, Any]:
        before = self._run.status()
        self._run.close()
        stored = everystep.open_run(self._run.path).steps
        counted = (
            *("stall_seconds", "device_stall_seconds", "records_dropped", "rebases"),
            *("bases_written", "log_bytes_written", "log_records_dropped"),
        )
        return {
            **{name: before[name] - self._before[name] for name in counted},
            "lag_steps": before.get("lag_steps"),
            "warm_up": {name: self._before[name] for name in counted},
            "mode": before.get("mode"),
            "exactness": before.get("exactness"),
            "replay": {n: before.get(n) for n in ("records", "replay_passes", "replay_seconds")},
            "link_bytes_per_second": before.get("link_bytes_per_second"),
            "window_seconds": before.get("window_seconds"),
            "shadow_step": before.get("shadow_step"),
            "trainer_step": before.get("trainer_step"),
            "durable_step": before.get("durable_step"),
            "durable_step_after_close": stored[-1] if stored else None,
            "shadow_pid": before.get("pid"),
            "host_bytes": before.get("memory_bytes"),
        }


class _Saver(Nothing):
    """Every k steps something is saved under a path of its own; the one before is removed."""

    def __init__(self, training: Training, folder: Path, every: int) -> None:
        self._training, self._folder, self._every = training, folder, every
        self._old: Path | None = None
        self._newest: int | None = None

    def after_step(self, step: int) -> None:
        if step % self._every == 0:
            path = self._folder / f"step-{step}"
            self.save(path, step)
            if self._old is not None:
                self.forget(self._old)
            self._old, self._newest = path, step

    def save(self, path: Path, step: int) -> None:
        raise NotImplementedError

    def forget(self, path: Path) -> None:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def close(self) -> dict[str, Any]:
        return {"durable_step": self._newest}


class TorchSave(_Saver):
    def save(self, path: Path, step: int) -> None:
        torch.save(self._training.state(), path)


class DcpSave(_Saver):
    def save(self, path: Path, step: int) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._training.state(), checkpoint_id=path, no_dist=True)


class DcpAsync(_Saver):
    """With its pinned stager, one save at a time, as its documentation has it."""

    def __init__(self, training: Training, folder: Path, every: int) -> None:
        super().__init__(training, folder, every)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        on_gpu = training.device.type == "cuda"
        self._new_stager = partial(DefaultStager, StagingOptions(on_gpu, False, False, False))
        self._stager = self._new_stager()
        # pytorch#183413: before 2.13 a stager is good for one save
        self._reusable = TorchVersion(torch.__version__) >= "2.13"
        self._pending: Any = None

    def save(self, path: Path, step: int) -> None:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self._wait()
        if not self._reusable and self._pending is not None:
            self._stager = self._new_stager()
        self._pending = async_save(
            self._training.state(), checkpoint_id=path, async_stager=self._stager, no_dist=True
        )

    def _wait(self) -> None:
        if self._pending is not None:
            result = getattr(self._pending, "upload_completion", self._pending)
            result.result()

    def close(self) -> dict[str, Any]:
        self._wait()
        self._stager.close()
        return super().close()


class TorchCheckpointing(_Saver):
    def __init__(self, training: Training, folder: Path, every: int) -> None:
        super().__init__(training, folder, every)
        import torch_checkpointing

        self._manager = torch_checkpointing.CheckpointManager()
        self._pending: Any = None

    def save(self, path: Path, step: int) -> None:
        if self._pending is not None:
            self._pending.result()
        self._pending = self._manager.save(str(path), self._training.state())

    def close(self) -> dict[str, Any]:
        if self._pending is not None:
            self._pending.result()
        self._manager.close()
        return super().close()


class LmResiliency(_Saver):
    """In the trainer's own memory; nothing survives the process."""

    def __init__(self, training: Training, folder: Path, every: int) -> None:
        super().__init__(training, folder, every)
        from lm_resiliency.checkpointing.config import InMemoryCkptConfig
        from lm_resiliency.checkpointing.manager import InMemoryCheckpointManager

        self._manager = InMemoryCheckpointManager(
            InMemoryCkptConfig(interval=every, disk_flush_interval=0, disk_folder=str(folder))
        )

    def save(self, path: Path, step: int) -> None:
        training = self._training
        state = [t for s in training.optimizer.state.values() for t in s.values()]
        tensors = [*training.model.parameters(), *(t for t in state if torch.is_tensor(t))]
        self._manager.save_tensors([t.detach() for t in tensors], step)

    def close(self) -> dict[str, Any]:
        self._manager.maybe_wait()
        self._manager.close()
        return {"durable_step": None}


class TorchSnapshot(_Saver):
    def save(self, path: Path, step: int) -> None:
        import torchsnapshot

        training = self._training
        state = {"model": training.model, "optimizer": training.optimizer}
        self._wait()
        self._pending = torchsnapshot.Snapshot.async_take(str(path), state)

    def _wait(self) -> None:
        pending = getattr(self, "_pending", None)
        if pending is not None:
            pending.wait()

    def close(self) -> dict[str, Any]:
        self._wait()
        return super().close()


METHODS: dict[str, tuple[Callable[[Training, Path, int], Method], str]] = {
    "none": (Nothing, ""),
    "everystep": (Everystep, ""),
    "everystep-log": (partial(Everystep, durable_log=1), ""),  # every step is on the disk
    "everystep-log-8": (partial(Everystep, durable_log=8), ""),
    "fixed-f100-b2": (partial(Everystep, durable_log=2, durable_every=100), ""),  # LowDiff's way
    "bases-f100": (partial(Everystep, durable_every=100), ""),
    "everystep-state": (
        partial(Everystep, tuning=Tuning(log=False)),
        "",
    ),  # the state itself: Checkflow's case
    "torch.save": (TorchSave, ""),
    "dcp.save": (DcpSave, ""),
    "dcp.async_save": (DcpAsync, ""),
    "torch_checkpointing": (TorchCheckpointing, "torch_checkpointing"),
    "lm-resiliency": (LmResiliency, "lm_resiliency"),
    "torchsnapshot": (TorchSnapshot, "torchsnapshot"),
}
LOGS = ("everystep-log", "everystep-log-8", "fixed-f100-b2", "bases-f100")


def installed(name: str) -> bool:
    module = METHODS[name][1]
    return not module or importlib.util.find_spec(module) is not None

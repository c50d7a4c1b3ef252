"""What single events cost training: a base that is taken meanwhile, a shadow that stands still, a kill."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

import everystep
from everystep.bench.clock import summary, timed
from everystep.bench.gpt import Training
from everystep.bench.links import disk, upload_rate
from everystep.bench.place import temporary_place
from everystep.errors import EverystepError
from everystep.session import Run

_WAIT_SECONDS = 120.0
_LOOK_EVERY = 4


@contextmanager
def _scene(model: str, batch: int, optimizer: str, folder: Path | None) -> Iterator[_Scene]:
    with temporary_place(folder) as place:
        yield _Scene(Training(model, batch, optimizer, compiled=False), place)


class _Scene:
    def __init__(self, training: Training, place: Path) -> None:
        self.training, self.place = training, place
        self.cuda = training.device.type == "cuda"
        for _ in range(3):
            training.step()

    def attach(self) -> Run:
        run = everystep.attach(
            self.training.model,
            self.training.optimizer,
            run=self.place / "run",
            every=1,
            durable_every="1h",
            on_failure="raise",
        )
        run.resume()
        return run

    def steps(self, run: Run | None, goes_on: Any) -> list[float]:
        def turn() -> None:
            self.training.step()
            if run is not None:
                run.seal()

        return timed(self.cuda, turn, goes_on)

    def until(self, run: Run, reached: Any) -> list[float]:
        """Steps until the status says so; it is looked at now and then, which costs a moment."""
        deadline = time.monotonic() + _WAIT_SECONDS

        def goes_on(count: int) -> bool:
            look = count % _LOOK_EVERY == 0
            return time.monotonic() < deadline and not (look and reached(run.status()))

        return self.steps(run, goes_on)


def base_cost(
    model: str, batch: int, optimizer: str, steps: int, folder: Path | None
) -> dict[str, Any]:
    """A base is taken while training goes on: its cost, its bits, and how fast it reaches the disk."""
    with _scene(model, batch, optimizer, folder) as scene:
        before = scene.steps(None, lambda n: n < steps)
        run = scene.attach()
        during = scene.until(run, lambda s: s["mode"] == "every step" and s["shadow_step"])
        writing = scene.until(run, lambda s: s["durable_step"] is not None)
        settled = scene.steps(run, lambda n: n < steps)
        status = run.status()
        expected = [t.clone() for t in scene.training.tensors()]
        run.close()
        after = scene.steps(None, lambda n: n < steps)
        for tensor in scene.training.tensors():
            tensor.zero_()
        at = everystep.restore(run.path, scene.training.model, scene.training.optimizer)
        pairs = zip(expected, scene.training.tensors(), strict=True)
        same = all(torch.equal(a, b.to(a.device)) for a, b in pairs)
        none = statistics.mean([*before, *after])
        rate, best = status["durable_write_bytes_per_second"], disk(scene.place, 4 << 30)["best"]
        return {
            "model": model,
            "optimizer": optimizer,
            "none": summary([*before, *after]),
            "while_the_base_is_taken": summary(during),
            "added_percent": 100 * (statistics.mean(during) / none - 1),
            "while_it_is_written": summary(writing) if writing else {},
            "afterwards": summary(settled),
            "step": at,
            "bit_identical": same,
            "exactness": status["exactness"],
            "records_dropped": status["records_dropped"],
            "waited_for_the_shadow_seconds": status["stall_seconds"],
            "waited_for_copies_seconds": status["device_stall_seconds"],
            "write_bytes_per_second": rate,
            "disk_bytes_per_second": best,
            "write_share_percent": 100 * rate / best,
        }


def pause_cost(
    model: str, batch: int, optimizer: str, seconds: float, folder: Path | None
) -> dict[str, Any]:
    """The shadow stands still for a while: nothing may be noticed, and recording comes back by itself."""

    def in_step(status: dict[str, Any]) -> bool:
        return status["mode"] == "every step" and status["lag_steps"] is not None

    with _scene(model, batch, optimizer, folder) as scene:
        none = scene.steps(None, lambda n: n < 30)
        run = scene.attach()
        scene.until(run, lambda s: in_step(s) and s["durable_step"] is not None)
        recording = scene.steps(run, lambda n: n < 30)
        shadow = run.status()["pid"]
        os.kill(shadow, signal.SIGSTOP)
        end = time.monotonic() + seconds
        paused = scene.steps(run, lambda _: time.monotonic() < end)
        os.kill(shadow, signal.SIGCONT)
        began = time.monotonic()
        returning = scene.until(run, in_step)
        back = time.monotonic() - began
        again = scene.steps(run, lambda n: n < 30)
        status = run.status()
        run.close()
        return {
            "model": model,
            "none": summary(none),
            "recording": summary(recording),
            "while_the_shadow_stands_still": summary(paused),
            "returning": summary(returning) if returning else {},
            "seconds_until_every_step": back,
            "recording_again": summary(again),
            "records_dropped": status["records_dropped"],
            "mode": status["mode"],
            "lag_steps": status["lag_steps"],
        }


def resume_cost(model: str, batch: int, optimizer: str, folder: Path | None) -> dict[str, Any]:
    """A trainer is killed with SIGKILL; the next one has its state back on the device."""
    command = [sys.executable, "-m", "everystep.bench.events"]
    given = [model, str(batch), optimizer]
    with temporary_place(folder) as place, (place / "errors").open("w+") as errors:
        first = subprocess.Popen(
            [*command, place, *given, "die"], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            assert first.stdout is not None
            trained = next((line for line in first.stdout if line.startswith("step ")), "")
        finally:
            first.kill()
            first.wait()
        second = subprocess.run(
            [*command, place, *given, "resume"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=600,
        )
        errors.seek(0)
        if not trained or second.returncode:
            said = "; ".join(errors.read().strip().splitlines()[-4:])
            raise EverystepError(f"bench resume: a trainer failed: {said}")
    document = second.stdout.strip().splitlines()[-1]
    return {"model": model, "killed_at": trained.strip(), **msgspec.json.decode(document)}


def _trainer(place: str, model: str, batch: int, optimizer: str, role: str) -> None:
    scene = _Scene(Training(model, batch, optimizer, compiled=False), Path(place))
    if role == "die":
        run = scene.attach()
        scene.until(run, lambda s: s["mode"] == "every step" and s["shadow_step"])
        scene.steps(run, lambda n: n < 5)
        sys.stdout.write(f"step {run.step}\n")
        sys.stdout.flush()
        while True:
            scene.steps(run, lambda n: n < 5)
    limit = upload_rate() if scene.cuda else 0.0
    began = time.perf_counter()
    run = scene.attach()
    attached = time.perf_counter() - began
    scene.steps(run, lambda n: n < 1)
    status = run.status()
    size = sum(tensor.nbytes for tensor in scene.training.tensors())
    load = status["attach_seconds"]["load"]
    document = {
        "resumed_at": run.step - 1,
        "from": status["resumed_from"],
        "state_bytes": size,
        "attach_seconds": status["attach_seconds"],
        "attach_seconds_total": attached,
        "first_step_seconds": time.perf_counter() - began,
        "load_bytes_per_second": size / load,
        "link_bytes_per_second": limit,
        "share_of_link_percent": 100 * size / load / limit if limit else None,
    }
    run.close()
    sys.stdout.write(f"\n{msgspec.json.encode(document).decode()}\n")


if __name__ == "__main__":
    place, model, batch, optimizer, role = sys.argv[1:]
    _trainer(place, model, int(batch), optimizer, role)

"""A process that has torch imported and forks trainers: a kill then costs no import of torch.

Every trainer is a process of its own; it shares with the nursery only pages nobody writes to. The
nursery itself never runs a kernel, so no thread of torch exists when it forks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec

WAIT_SECONDS = 90.0


class Nursery:
    """The test's side: start trainers, learn how they ended."""

    def __init__(self) -> None:
        here = Path(__file__).resolve().parent
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{here.name}.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=here.parent,
        )

    @property
    def _runtime(self) -> str:
        return os.environ["EVERYSTEP_RUNTIME_DIR"]  # every test has its own

    @property
    def errors(self) -> Path:
        return Path(self._runtime) / "trainer.err"

    def start(self, job: str, total: int, journal: Path, **options: Any) -> int:
        """Fork a trainer and return its pid."""
        options = msgspec.to_builtins(options, enc_hook=str)  # paths
        order = {"job": job, "total": total, "journal": str(journal), **options}
        return int(self._say({**order, "errors": str(self.errors), "runtime": self._runtime}))

    def wait(self, pid: int, seconds: float = WAIT_SECONDS) -> int:
        """How the trainer ended, as subprocess does: negative is a signal. Fails if it does not end."""
        code = int(self._say({"wait": pid, "seconds": seconds}))
        if code == 1000:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"trainer {pid} did not end within {seconds:g} s")
        return code

    def run(self, job: str, total: int, journal: Path, **options: Any) -> None:
        """A trainer that must end by itself, and well."""
        # a reference may be thousands of steps: what matters is that there is a bound
        code = self.wait(self.start(job, total, journal, **options), 10 * WAIT_SECONDS)
        assert code == 0, f"trainer ended with {code}:\n{self.why()}"

    def why(self) -> str:
        return self.errors.read_text()[-4000:] if self.errors.exists() else "nothing was said"

    def _say(self, order: dict[str, Any]) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the nursery died with {self._process.poll()}"
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def _wait(pid: int, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return 1000


def _be_trainer(order: dict[str, Any]) -> None:
    from .instants import arm
    from .jobs import train

    job, total, journal = order.pop("job"), order.pop("total"), Path(order.pop("journal"))
    os.environ["EVERYSTEP_RUNTIME_DIR"] = order.pop("runtime")
    errors = os.open(order.pop("errors"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    instant = order.pop("instant", None)
    if "run" in order:
        order["run"] = Path(order["run"])
    code = 1
    try:
        if instant is not None:
            arm(*instant)
        train(job, total, journal, **order)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    import torch

    from . import instants, jobs  # noqa: F401 - imported here once, not in every trainer

    torch.set_num_threads(1)
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            answer = _wait(order["wait"], order["seconds"])
        else:
            answer = os.fork()
            if answer == 0:
                _be_trainer(order)
        with contextlib.suppress(BrokenPipeError):
            print(answer, flush=True)


if __name__ == "__main__":
    main()

"""Where a trainer kills itself: each instant is a place in the code, before, while or after it runs.

A place that no longer exists makes the trainer fail with an AttributeError, not pass unharmed.
"""

from __future__ import annotations

import functools
import importlib
import os
import random
import signal
import threading
import time
from typing import Any

_OPTIMIZERS = ("adam:Adam", "sgd:SGD", "rmsprop:RMSprop", "adagrad:Adagrad")
_IN_STEP = [f"torch.optim.{place}._init_group" for place in _OPTIMIZERS]

# name: (when, places as module:attribute)
IN_LOOP: dict[str, tuple[str, list[str]]] = {
    "in backward": ("while", ["torch.autograd:_engine_run_backward"]),
    "in step": ("while", _IN_STEP),
    "in step, nothing moved yet": ("before", _IN_STEP),
    "gradients copied": (
        "after",
        ["everystep.capture.copying.gradient_copies:GradientCopies.send"],
    ),
    "step done, not said": ("before", ["everystep.capture.hooks:StepHooks._after_step"]),
    "in seal": ("before", ["everystep.capture.seals:SealSender.send"]),
    "slot half written": ("before", ["everystep.format.slot:pack_slot_header"]),
    "one commit word": ("before", ["everystep.capture.copying.copier:Copier.commit"]),
    "both commit words": ("after", ["everystep.capture.copying.copier:Copier.commit"]),
    "sealed": ("after", ["everystep.capture.tap:Tap.seal"]),
}
IN_ATTACH: dict[str, tuple[str, list[str]]] = {
    "found": ("after", ["everystep.recover.attempts:find_newest"]),
    "loading": ("before", ["everystep.recover.loader:Loader._load_optimizers"]),
    "loaded": ("after", ["everystep.recover.loader:Loader._load_optimizers"]),
    "before the shadow": ("before", ["everystep.connection:start_shadow"]),
    "shadow starting": ("before", ["everystep.process.spawn:_read_pid"]),
    "shadow started": ("after", ["everystep.connection:start_shadow"]),
    "hooks installed": ("after", ["everystep.capture.hooks:StepHooks.install"]),
}
PLACES = {**IN_LOOP, **IN_ATTACH}


def arm(name: str, countdown: int) -> None:
    """Die at the `countdown`-th visit of a place."""
    when, places = PLACES[name]
    left = [countdown]
    for place in places:
        module, _, path = place.partition(":")
        owner: Any = importlib.import_module(module)
        *parents, attribute = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, attribute, _deadly(getattr(owner, attribute), when, left))


def _deadly(work: Any, when: str, left: list[int]) -> Any:
    @functools.wraps(work)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and when == "before":
            _die()
        if left[0] == 0 and when == "while":
            threading.Thread(target=_die, args=(random.SystemRandom().uniform(0, 5e-4),)).start()
        result = work(*args, **kwargs)
        if left[0] == 0 and when == "after":
            _die()
        return result

    return wrapped


def _die(after_seconds: float = 0.0) -> None:
    time.sleep(after_seconds)
    os.kill(os.getpid(), signal.SIGKILL)

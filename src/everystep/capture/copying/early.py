"""The early tap: large gradients leave during backward, as soon as each is final.

For jobs whose copies do not fit between the step and the end of the next forward. It is sound only if
nothing touches gradients after backward, which is learned first and watched ever after: by identity and
version at every step, and by digests, of all gradients while learning and of one now and then later.
Clipping or a GradScaler make it refuse by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

import torch

from everystep.capture.census import kind, kind_of_gradient
from everystep.capture.copying.copier import Copier
from everystep.core.census import PACKED_BYTES_MAX, GradientLayout
from everystep.core.pace import worth_a_hook
from everystep.replay.fingerprints import digest_tensors

_SURE_AFTER_STEPS = 3
_LEARNING_STEPS_MAX = 16
_PART_BYTES = 32 << 20
_DIGEST_EVERY = 4  # a digest takes as long as ten hooks

Guard = Callable[[Callable[..., Any]], Callable[..., Any]]
Place = Callable[[], int | None]  # room in the ring for this call's gradients, if there is any


class Trust(StrEnum):
    LEARNING = "learning"
    ARMED = "armed"
    REFUSED = "refused"


class EarlyTap:
    """Of one optimizer. Hooks run while the training thread waits in `backward`."""

    def __init__(
        self,
        optimizer: int,
        parameters: Sequence[torch.Tensor],
        layout: GradientLayout,
        copier: Copier,
        place: Place,
        guard: Guard,
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._layout = layout
        self._copier = copier
        self._place = place
        self._guard = guard
        self._large = hooked_members(parameters)
        self._kinds = {i: (torch.strided, *kind(parameters[i])) for i in self._large}
        self._sizes = {i: parameters[i].nbytes for i in self._large}
        self._handles: list[Any] = []
        self.trust = Trust.LEARNING
        self.address: int | None = None  # where this step's gradients are going
        self._good_steps = 0
        self._times: dict[int, int] = {}  # how often each was accumulated, this step
        self._usual: dict[int, int] = {}  # and in the step before
        self._seen: dict[int, tuple[torch.Tensor, int]] = {}  # gradient and version, when last seen
        self._digests: dict[int, torch.Tensor] = {}
        self._verdicts: list[tuple[torch.Tensor, Any, Any]] = []
        self._ready: list[int] = []
        self._ready_bytes = 0
        self._copied: set[int] = set()
        self._turn = 0
        self._in_turn = -1  # whose digest is taken at this step
        self.hook()

    def hook(self) -> None:
        """Look at gradients from here on."""
        if self._handles or self.trust is Trust.REFUSED:
            return
        accumulated = self._guard(self._accumulated)
        self._handles = [
            self._parameters[i].register_post_accumulate_grad_hook(partial(accumulated, i))
            for i in self._large
        ]

    def unhook(self) -> None:
        """Nothing is recorded from here on: cost nothing."""
        self._remove_hooks()
        self.forget_step()

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ------------------------------------------------------------------ during backward

    def _accumulated(self, member: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or kind_of_gradient(gradient) != self._kinds[member]:
            return
        self._times[member] = self._times.get(member, 0) + 1
        if self._times[member] < self._usual.get(member, 1):
            return  # more micro-batches will be added to it
        self._seen[member] = (gradient, gradient._version)
        if self.trust is Trust.LEARNING or member == self._in_turn:
            self._digests[member] = digest_tensors([gradient])
        if self.trust is Trust.ARMED:
            self._ready.append(member)
            self._ready_bytes += self._sizes[member]
            if self._ready_bytes >= _PART_BYTES:
                self._send()

    def _send(self) -> None:
        if self._ready and self.address is None:
            self.address = self._place()
        if self._ready and self.address is not None:
            gradients = {i: self._seen[i][0] for i in self._ready}
            self._copier.gradients.send_some(self.address, self._optimizer, self._layout, gradients)
            self._copied.update(self._ready)
        self._ready, self._ready_bytes = [], 0

    # ------------------------------------------------------------------ at the step

    def take(self, gradients: Sequence[torch.Tensor | None]) -> set[int]:
        """Members that have left and are still as they were; everything else is copied now."""
        self._send()
        unchanged = {
            member
            for member, (gradient, version) in self._seen.items()
            if gradients[member] is gradient and gradient._version == version
        }
        regular = unchanged >= set(self._large) and self._times == self._usual
        if self.trust is Trust.ARMED and not self._copied <= unchanged:
            self.refuse()  # what is copied now comes later, and wins
        elif self.trust is Trust.LEARNING:
            self._good_steps = self._good_steps + 1 if regular else 0
        self._judge(gradients)
        return self._copied & unchanged

    def _judge(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Compare digests on the device; the answer is read when it has arrived."""
        members = [member for member in self._digests if gradients[member] is not None]
        if members:
            early = torch.cat([self._digests[member] for member in members])
            late = digest_tensors([g for m in members if (g := gradients[m]) is not None])
            self._verdicts.append(self._copier.gradients.read_later((early == late).all()))

    def end_step(self) -> bool:
        """After the step. False: a digest shows that gradients changed without a trace before, and what
        was copied early is not to be trusted."""
        sound = True
        while self._verdicts and self._verdicts[0][1].passed(self._verdicts[0][2]):
            sound &= bool(self._verdicts.pop(0)[0])
        was_armed = self.trust is Trust.ARMED
        if not sound:
            self.refuse()
        elif self.trust is Trust.LEARNING and self._good_steps > _SURE_AFTER_STEPS:
            self.trust = Trust.ARMED
        elif self.trust is Trust.LEARNING and self._turn > _LEARNING_STEPS_MAX:
            self.refuse()
        self._usual = self._times
        self._turn += 1
        turn, due = divmod(self._turn, _DIGEST_EVERY)
        self._in_turn = self._large[turn % len(self._large)] if self._large and not due else -1
        self.forget_step()
        return sound or not was_armed

    def refuse(self) -> None:
        """Gradients are touched after backward: the tap at the step serves this job."""
        self.trust = Trust.REFUSED
        self._remove_hooks()

    def forget_step(self) -> None:
        """Nothing of a step's gradients is kept alive behind it."""
        self._times, self._seen, self._digests = {}, {}, {}
        self._ready, self._ready_bytes, self._copied, self.address = [], 0, set(), None


def hooked_members(parameters: Sequence[torch.Tensor]) -> list[int]:
    """Whose gradients leave early: large ones that together are most of all bytes."""
    large = [i for i, p in enumerate(parameters) if p.requires_grad and p.nbytes > PACKED_BYTES_MAX]
    return [large[i] for i in worth_a_hook([parameters[i].nbytes for i in large])]

"""`attach` and `Run`: the one place in the trainer that wires everything together."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from everystep.capture.census import LiveCensus, Models, Optimizers, take_census
from everystep.capture.rng import capture_rng, restore_rng
from everystep.capture.state import UserState
from everystep.capture.tap import Tap
from everystep.connection import Connection, connect
from everystep.core.cadence import retry_seconds
from everystep.core.status import summary
from everystep.errors import (
    CaptureTooLarge,
    EverystepError,
    LaneTimeout,
    NothingToRecover,
    ShadowLost,
    UsageError,
)
from everystep.format.base import Point
from everystep.lane.control import (
    Answer,
    AskClose,
    AskFlush,
    AskLeave,
    AskRetire,
    AskStatus,
    Request,
)
from everystep.lane.runtime import ShadowCard, TrainerLock, runtime_dir
from everystep.options import Options, resolve
from everystep.recover.find import Found, find_newest, retire
from everystep.recover.load import check_model, load_optimizers, load_values, same_atoms

log = logging.getLogger("everystep")

_DURABLE_SECONDS = 3600.0
_WAIT_SECONDS = 600.0
_DOCUMENT_SLACK_BYTES = 16 << 10


def attach(
    model: Models,
    optimizer: Optimizers,
    *,
    run: str | Path,
    state: Mapping[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Make every step of this training a checkpoint, and go on from the newest one there is.

    Tensors and user state are restored when this returns; random states at the first turn of
    `steps` (or in `resume`), because making an iterator draws from them.
    """
    chosen = resolve(options)
    return Run(model, optimizer, Path(run).absolute(), state, chosen)


def restore(
    run: str | Path,
    model: Models,
    optimizer: Optimizers | None = None,
    step: int | None = None,
) -> int:
    """Load the newest step (or a retained one) without attaching; returns the step loaded."""
    path = Path(run).absolute()
    found, _ = find_newest(path, runtime_dir(str(path)) if _trainer_is_gone(path) else None, step)
    if found is None:
        raise NothingToRecover(f"restore {path}: no valid base", hint="everystep verify tells why")
    if found.tail_steps and optimizer is None:
        raise UsageError(
            f"restore {path}: the newest {found.tail_steps} steps are a log of gradients",
            hint="give the optimizer too: it redoes them",
        )
    live = take_census(model, optimizer if optimizer is not None else _no_optimizer(model))
    check_model(live.census, found, str(path))
    ids = same_atoms(live.census, found.census)
    load_values(found, live.tensors, ids)
    if optimizer is not None:
        load_optimizers(found, _keyed(live), live.tensors, ids)
    return found.point.step


class Run:
    """One attach of a run. Belongs to the thread that trains."""

    def __init__(
        self,
        model: Models,
        optimizer: Optimizers,
        path: Path,
        state: Mapping[str, Any] | None,
        options: Options,
    ) -> None:
        self.path = path
        self._options = options
        self._models, self._optimizers = model, optimizer
        self._step = 0
        self._connection: Connection | None = None
        self._tap: Tap | None = None
        self._looping = False
        self._closed = False
        self._problem = ""
        self._resumed_from = ""
        self._rng_to_restore: bytes | None = None
        if options.enabled:
            _refuse_many_ranks()
            self._user_state = UserState(state)
            self._document_bytes = len(self._user_state.collect()) + _DOCUMENT_SLACK_BYTES
            self._folder = runtime_dir(str(path))
            self._lock = TrainerLock(self._folder, str(path))
            try:
                self._begin()
            except BaseException:
                self._lock.close()
                raise

    # ------------------------------------------------------------------ beginning

    def _begin(self) -> None:
        self._point: Point | None = None
        self._failures = 0
        self._retry_at = 0.0
        self._dropped = 0
        self._stall_seconds = 0.0
        self._respawn: threading.Thread | None = None
        self._respawned: list[Connection | EverystepError] = []
        live = take_census(self._models, self._optimizers)
        self._versions = [0] * len(live.tensors)
        found, card = find_newest(self.path, self._folder)
        if found is not None:
            live = self._load(live, found)
        adoptable = found if found and found.holding and _same_shape(found, live) else None
        self._connect(live, found=adoptable, predecessor=card)
        if adoptable is None:
            assert self._tap is not None
            self._tap.queue_base()
            self._tap.send_base()
        if card is not None and adoptable is not None:
            self._retire_predecessor()
        if found is not None:
            for memory in found.memory:
                memory.close()
            self._say_resumed(found)

    def _load(self, live: LiveCensus, found: Found) -> LiveCensus:
        """Bring live objects to a found point; groups added during the run come back too."""
        check_model(live.census, found, str(self.path))
        ids = same_atoms(live.census, found.census)
        self._versions = load_values(found, live.tensors, ids)
        load_optimizers(found, _keyed(live), live.tensors, ids)
        self._user_state.restore(found.session.state)
        self._rng_to_restore = found.session.rng
        self._step, self._point = found.point.step, found.point
        self._resumed_from = found.source
        return take_census(self._models, self._optimizers)

    def _say_resumed(self, found: Found) -> None:
        for problem in found.problems:
            warnings.warn(f"everystep: {problem}", stacklevel=4)
        log.info(
            "resumed run=%s step=%d from=%s exactness=%s (%s) replayed_steps=%d",
            self.path,
            found.point.step,
            found.source,
            found.census.exactness,
            found.census.why,
            found.tail_steps,
        )

    def _connect(
        self, live: LiveCensus, *, found: Found | None, predecessor: ShadowCard | None
    ) -> None:
        self._use(self._new_connection(live, found, predecessor), live)

    def _new_connection(
        self, live: LiveCensus, found: Found | None, predecessor: ShadowCard | None
    ) -> Connection:
        return connect(
            self.path,
            self._folder,
            live.census,
            self._options,
            step=self._step,
            document_bytes=self._document_bytes,
            continues=self._point,
            found=found,
            predecessor=predecessor,
        )

    def _use(self, connection: Connection, live: LiveCensus) -> None:
        """Record into this connection from here on."""
        self._connection = connection
        self._tap = Tap(
            live,
            connection.ring,
            self._user_state,
            step=self._step,
            versions=self._versions,
            guard=self._guarded,
            may_wait=self._waiting_rule(),
        )
        self._tap.opening_rng = self._rng_to_restore or capture_rng()
        self._tap.install()

    def _retire_predecessor(self) -> None:
        """The new shadow holds the state: the one before may go."""
        if self._connection is not None and self._connection.predecessor is not None:
            retire(self._connection.predecessor)
            self._connection.predecessor = None

    # ------------------------------------------------------------------ the loop

    @property
    def step(self) -> int:
        """Steps sealed so far; also the index of the step to come."""
        return self._step

    def steps(self, total: int) -> Iterator[int]:
        """Indices of the steps still to do, up to `total`; each turn seals the step before."""
        start = self.resume()
        if total < start:
            raise UsageError(
                f"steps({total}) of {self.path}: the run is already at step {start}",
                hint=f"give a total of at least {start}, or rewind first",
            )
        return _Steps(self, total)

    def resume(self) -> int:
        """For loops that are not ours: restore random states, return the step to begin with."""
        self._check_open()
        if self._tap is not None and not self._tap.opened:
            if self._rng_to_restore is not None:
                restore_rng(self._rng_to_restore)
                self._rng_to_restore = None
            self._guarded(self._tap.seal)(self._step)
        return self._step

    def seal(self) -> None:
        """End a step in a loop that is not ours; `steps` does it by itself."""
        self._check_open()
        if self._looping:
            raise UsageError(
                f"seal at step {self._step}: steps() seals every step by itself",
                hint="drop the call, or loop over range(run.resume(), total) instead",
            )
        if self._options.enabled and self._tap is not None and self._nothing_happened():
            raise UsageError(
                f"seal called twice at step {self._step}: nothing has happened since the last seal",
                hint="call it once per step; a skipped step shows in the state of a GradScaler or loader",
            )
        self._seal()

    def _nothing_happened(self) -> bool:
        assert self._tap is not None
        return self._tap.opened and self._tap.flowing and self._tap.nothing_happened()

    def _seal(self) -> None:
        self._step += 1
        if not self._options.enabled:
            return
        if self._tap is not None:
            self._guarded(self._tap.seal)(self._step)
            if self._tap is not None and self._tap.outgrown:
                self._guarded(self._change_lane)()
        self._guarded(self._look_after_shadow)()

    # ------------------------------------------------------------------ failures

    def _guarded(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The trainer's boundary: a failure of ours degrades loudly, unless the user wants it raised."""

        @functools.wraps(work)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return work(*args, **kwargs)
            except CaptureTooLarge as error:
                if self._tap is not None:
                    self._tap.outgrown = True
                self._document_bytes = 2 * self._document_bytes + _DOCUMENT_SLACK_BYTES
                log.info("ring_outgrown run=%s %s", self.path, error)
            except Exception as error:
                if self._options.on_failure == "raise":
                    raise
                self._lose_connection(f"{type(error).__name__}: {error}")
            return None

        return guarded

    def _lose_connection(self, reason: str) -> None:
        """Stop recording; `_look_after_shadow` connects anew after a while."""
        if self._problem != reason:
            log.error("degraded run=%s step=%d reason=%s", self.path, self._step, reason)
        self._problem = reason
        self._failures += 1
        self._retry_at = time.monotonic() + retry_seconds(self._failures - 1)
        self._drop_connection()

    def _drop_connection(self) -> None:
        if self._tap is not None:
            self._dropped += self._tap.dropped
            self._stall_seconds += self._tap.outbox.stall_seconds
            self._tap.remove()
            self._tap = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _look_after_shadow(self) -> None:
        """Once a step: is it alive, is a new one ready, may the one before go?"""
        if self._connection is not None:
            if not self._connection.shadow.alive:
                self._lose_connection(f"shadow {self._connection.shadow.pid} is gone")
                self._retry_at = time.monotonic()
            elif self._connection.predecessor is not None and self._connection.ring.replayed_step:
                self._retire_predecessor()
        elif self._respawned:
            self._welcome(self._respawned.pop())
        elif self._respawn is None and time.monotonic() >= self._retry_at:
            live = take_census(self._models, self._optimizers)
            self._respawn = threading.Thread(target=self._start_again, args=(live,), daemon=True)
            self._respawn.start()

    def _start_again(self, live: LiveCensus) -> None:
        """In a thread of its own: training does not wait for a process to start."""
        try:
            self._respawned.append(self._new_connection(live, None, None))
        except EverystepError as error:
            self._respawned.append(error)

    def _welcome(self, connection: Connection | EverystepError) -> None:
        self._respawn = None
        if isinstance(connection, EverystepError):
            raise connection
        self._versions = list(self._versions)
        self._use(connection, take_census(self._models, self._optimizers))
        self._base_and_open()
        log.warning(
            "reconnected run=%s step=%d shadow=%d", self.path, self._step, connection.shadow.pid
        )
        self._problem = ""
        self._failures = 0

    def _base_and_open(self) -> None:
        """At a step's end: send what fits of a new base and seal the step again as its beginning."""
        assert self._tap is not None
        self._versions[:] = [self._step] * len(self._versions)
        self._tap.queue_base()
        self._tap.seal(self._step)

    def _change_lane(self) -> None:
        """The census or a slot's size is no longer right: a new shadow, the old one until it is based."""
        old = self._connection
        live = take_census(self._models, self._optimizers)
        predecessor = None
        if old is not None and old.shadow.alive:
            answer = old.shadow.ask(AskStatus(), timeout_seconds=30)
            self._note_epoch(answer)
            predecessor = self._card_of(old)
        self._drop_connection()
        self._versions = [self._step] * len(live.tensors)
        self._connect(live, found=None, predecessor=predecessor)
        self._base_and_open()

    def _card_of(self, connection: Connection) -> ShadowCard | None:
        from everystep.lane.runtime import read_card

        card = read_card(self._folder)
        return card if card is not None and card.pid == connection.shadow.pid else None

    def _note_epoch(self, answer: Answer) -> None:
        epoch = answer.status.get("epoch")
        if epoch:
            self._point = Point(epoch, self._step)

    def _waiting_rule(self) -> Callable[[], bool]:
        """May the tap wait for a slot? While the shadow starts, or if the user prefers to lose nothing."""
        began = 0.0

        def may_wait() -> bool:
            nonlocal began
            connection = self._connection
            if connection is None or not connection.shadow.alive:
                return False
            now = time.monotonic()
            if now - began > _WAIT_SECONDS:  # a new wait, or one that went on for too long
                if began and now - began < _WAIT_SECONDS + 1:
                    return False
                began = now
            return self._options.on_lag == "wait" or not connection.ring.shadow_is_warm

        return may_wait

    # ------------------------------------------------------------------ asking and ending

    def _ask(self, request: Request, timeout_seconds: float) -> Answer:
        """Ask the shadow, noticing within a second if it dies meanwhile."""
        if self._connection is None:
            raise ShadowLost(f"run {self.path}: no shadow at the moment ({self._problem})")
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                return self._connection.shadow.ask(
                    request, timeout_seconds=max(0.1, min(2.0, deadline - time.monotonic()))
                )
            except LaneTimeout:
                if not self._connection.shadow.alive:
                    raise ShadowLost(f"run {self.path}: the shadow died") from None
                if time.monotonic() >= deadline:
                    raise

    def flush(self, timeout_seconds: float = _DURABLE_SECONDS) -> int:
        """Return once the newest sealed step is durable in the store."""
        self._check_open()
        if not self._options.enabled:
            return self._step
        self.resume()
        answer = self._ask(AskFlush(self._step), timeout_seconds)
        if answer.error:
            raise EverystepError(
                f"flush {self.path} at step {self._step}: {answer.error}",
                hint="training goes on; everystep status tells when the store has healed",
            )
        return self._step

    def status(self) -> dict[str, Any]:
        """The same document as `everystep status`, with the trainer's own figures."""
        if not self._options.enabled:
            return {
                "summary": "everystep is disabled for this run",
                "enabled": False,
                "step": self._step,
            }
        document: dict[str, Any] = {"run": str(self.path), "trainer_step": self._step}
        try:
            document |= self._ask(AskStatus(), 5).status
        except EverystepError as error:
            document |= {"health": "degraded", "problem": str(error), "shadow_step": None}
        if self._problem:
            document |= {"health": "degraded", "problem": self._problem}
        tap = self._tap
        document |= {
            "resumed_from": self._resumed_from,
            "records_let_go": self._dropped + (tap.dropped if tap else 0),
            "stall_seconds": self._stall_seconds + (tap.outbox.stall_seconds if tap else 0.0),
            "state_dict_seconds_total": self._user_state.seconds_total,
            "state_dict_seconds_max": self._user_state.seconds_max,
        }
        return {"summary": summary(document), **document}

    def rewind(self, step: int) -> int:
        """Take live training back to a retained step; the loop goes on from there."""
        self._check_open()
        if not self._options.enabled:
            raise UsageError("rewind: everystep is disabled for this run")
        found, _ = find_newest(self.path, None, step)
        if found is None:
            raise NothingToRecover(f"rewind {self.path} to step {step}: no valid base")
        old = self._connection
        predecessor = self._card_of(old) if old is not None else None
        live = self._load(take_census(self._models, self._optimizers), found)
        self._drop_connection()
        self._connect(live, found=None, predecessor=predecessor)
        assert self._tap is not None
        self._tap.queue_base()
        self._tap.send_base()
        self.resume()
        log.info("rewound run=%s step=%d", self.path, step)
        return self._step

    def close(self) -> None:
        """Seal a finished step, make everything durable, and let the shadow go."""
        self._end(failed=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(failed=kind is not None)

    def _end(self, *, failed: bool) -> None:
        if self._closed:
            return
        if not failed and self._tap is not None and self._tap.calls:
            self._looping = False
            self._seal()
        self._closed = True
        if not self._options.enabled:
            return
        try:
            if (
                failed
            ):  # the state of an unfinished step does not count; the shadow keeps the last one
                with contextlib.suppress(EverystepError):
                    self._ask(AskLeave(), 5)
            else:
                self._guarded(self._close_shadow)()
        finally:
            self._drop_connection()
            if self._respawn is not None:
                self._respawn.join()
                self._abandon_respawned()
            self._lock.close()

    def _close_shadow(self) -> None:
        if self._connection is None and self._respawn is not None:
            self._respawn.join()
            self._look_after_shadow()
        if self._tap is not None and not self._tap.opened:
            self._tap.seal(self._step, rng=self._tap.opening_rng)
        while self._tap is not None and not (self._tap.flowing and self._tap.base_is_sent):
            if self._connection is None or not self._connection.shadow.alive:
                raise ShadowLost(f"close {self.path}: the shadow died")
            time.sleep(0.01)
            self._tap.seal(self._step)
        answer = self._ask(AskClose(self._step), _DURABLE_SECONDS)
        if answer.error:
            raise EverystepError(f"close {self.path} at step {self._step}: {answer.error}")
        assert self._connection is not None
        self._connection.shadow.wait_gone(10)

    def _abandon_respawned(self) -> None:
        for connection in self._respawned:
            if isinstance(connection, Connection):
                with contextlib.suppress(EverystepError):
                    connection.shadow.ask(AskRetire(), timeout_seconds=5)
                connection.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"run {self.path}: it is closed", hint="attach again")


class _Steps:
    """The loop of `run.steps`. Not a generator: `break` and an exception must be told apart, and only
    the end of the `with` block can."""

    def __init__(self, run: Run, total: int) -> None:
        self._run = run
        self._total = total
        self._turn_open = False

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        run = self._run
        run._check_open()
        if self._turn_open:
            run._seal()
        self._turn_open = run.step < self._total
        run._looping = self._turn_open
        if not self._turn_open:
            raise StopIteration
        return run.step


def _keyed(live: LiveCensus) -> list[tuple[str, torch.optim.Optimizer]]:
    return [
        (spec.key, optimizer)
        for spec, optimizer in zip(live.census.optimizers, live.optimizers, strict=True)
    ]


def _same_shape(found: Found, live: LiveCensus) -> bool:
    """The shadow's memory can be handed on only if it describes exactly what we train now."""
    return found.census == live.census


def _no_optimizer(model: Models) -> Optimizers:
    return {}


def _trainer_is_gone(path: Path) -> bool:
    from everystep.lane.control import ask
    from everystep.lane.runtime import read_card

    card = read_card(runtime_dir(str(path)))
    if card is None:
        return False
    try:
        return ask(card.control, AskStatus(), timeout_seconds=5).status.get("trainer_pid") is None
    except EverystepError:
        return False


def _refuse_many_ranks() -> None:
    distributed = torch.distributed
    if (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    ):
        raise UsageError(
            f"attach: {distributed.get_world_size()} ranks; this version records one process per run",
            hint="attach with a world size of 1",
        )

"""Old kernels, sandboxes and limits refuse what we like to have: it goes on in another way and says so, or
fails in words that name the limit."""

from __future__ import annotations

import errno
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import wait_until

import everystep
from everystep.cli.doctor import examine
from everystep.device import pages
from everystep.errors import DescriptorsRefused, NotEnoughMemory
from everystep.lane.arena import SharedMemory
from everystep.lane.descriptors import DescriptorServer, receive_descriptors
from everystep.lane.host import process_start
from everystep.process.watch import ProcessWatch
from everystep.store.reader import open_run

from .traces import bits, model, sgd, train_step

STEPS = 4
NO_PIDFD = """
import errno, os
def refuse(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")
os.pidfd_open = refuse
"""


def in_a_child(work: Callable[[], object]) -> str:
    """What the work returns or raises, in words, in a process that it may cripple."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = str(work())
        except BaseException as error:  # told to the test
            said = f"{type(error).__name__}: {error}"
        os.write(write_end, said.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as file:
        said = file.read()
    os.waitpid(pid, 0)
    return said


def life(run: Path) -> dict[str, Any]:
    """A trainer's, whose newest step only the shadow holds; meant for a process that ends without a word."""
    net = model()
    optimizer = sgd(net)
    training = everystep.attach(net, optimizer, run=run, on_lag="wait", durable_every="1h")
    for _ in training.steps(STEPS):
        train_step(net, optimizer)
    weights = b"".join(bits(net).values()).hex()
    return {"weights": weights, "limitations": training.status()["limitations"]}


def findings() -> str:
    return " ".join(f"{f['level']}: {f['what']}" for f in examine()["findings"])


def test_no_pidfd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the trainer nor its shadow gets one: each notices the other's end all the same."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NO_PIDFD)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])  # the shadow's as well

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    run = tmp_path / "run"

    told = in_a_child(lambda: life(run))
    assert "pidfd_open is refused here (Function not implemented)" in told
    wait_until(
        lambda: (run / "everystep.json").exists() and open_run(run).steps[-1:] == [STEPS],
        "last words",
    )
    net = model()
    training = everystep.attach(net, sgd(net), run=run)
    assert training.step == STEPS and training.status()["resumed_from"] == "shadow"
    recorder = training._recorder
    assert recorder is not None and recorder.link.connection is not None
    shadow = recorder.link.connection.shadow
    assert shadow.alive
    os.kill(shadow.pid, 9)
    assert shadow.wait_gone(30) and not shadow.alive
    training._end(failed=True)
    assert "note: pidfd_open is refused here" in findings()


def test_a_watch_without_pidfd_tells_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for plain in (True, False):
        if not plain:
            monkeypatch.delattr(os, "pidfd_open")
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(read_end, 1)
            os._exit(0)
        watch, other = ProcessWatch(pid), ProcessWatch(pid, process_start(pid) + 1)
        assert bool(watch.refused) is not plain
        assert not watch.gone and not watch.wait_gone(0.05)
        assert other.gone, "another process has its pid now"
        os.write(write_end, b"x")
        assert watch.wait_gone(30) and watch.gone
        os.waitpid(pid, 0)
        assert watch.gone and ProcessWatch(pid).gone
        for fd in (read_end, write_end):
            os.close(fd)
        watch.close()
        other.close()


def refuses(*_: object, **__: object) -> Any:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_descriptors_that_may_not_be_received(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest step, which no base holds yet, comes through the store."""
    run = tmp_path / "run"

    told = in_a_child(lambda: life(run))
    monkeypatch.setattr(socket, "recv_fds", refuses)
    net = model()
    words = r"descriptor passing is refused here \(Operation not permitted.*resuming from there"
    with pytest.warns(UserWarning, match=words):
        training = everystep.attach(net, sgd(net), run=run)
    assert training.step == STEPS and b"".join(bits(net).values()).hex() in told
    assert training.status()["resumed_from"] == "store"
    training.close()
    assert "note: descriptor passing is refused here (Operation not permitted)" in findings()


@contextmanager
def serving(path: Path, fds: list[int]) -> Iterator[None]:
    server, done = DescriptorServer(path), threading.Event()

    def serve() -> None:
        while not done.wait(0.01):
            server.serve(fds)

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    done.set()
    thread.join()
    server.close()


def test_descriptors_that_may_not_be_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shadow says why, at once."""
    monkeypatch.setattr(socket, "send_fds", refuses)
    with (
        serving(tmp_path / "s", [0]),
        pytest.raises(DescriptorsRefused, match="sending: Operation not permitted"),
    ):
        receive_descriptors(str(tmp_path / "s"), 1)


def test_descriptors_that_are_withheld(tmp_path: Path) -> None:
    """As SELinux does, and a process with too many open files: the message comes without them."""

    def receive_few() -> object:
        *_, socket_fd, last = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, last + 1))
        os.close(socket_fd)
        os.close(last)
        return receive_descriptors(str(tmp_path / "s"), 5)

    with serving(tmp_path / "s", [0] * 5):
        said = in_a_child(receive_few)
    assert "descriptor passing is refused here (the kernel withholds them" in said


def test_many_descriptors_come_in_parts(tmp_path: Path) -> None:
    with serving(tmp_path / "s", [0] * 600):
        fds = receive_descriptors(str(tmp_path / "s"), 600)
    assert len(set(fds)) == 600
    for fd in fds:
        os.close(fd)


def test_a_peer_that_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    server = DescriptorServer(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(str(tmp_path / "s"))
        began = time.monotonic()
        server.serve([0])
        assert time.monotonic() - began < 5
    server.close()


def test_page_locking_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Copies are not locked then, and status says so."""

    class Runtime:
        def cudaHostRegister(self, *_: int) -> int:
            return 2

    monkeypatch.setattr(pages, "refusals", said := [])
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(pages, "_forget_error", lambda: None)
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    assert not pages.lock_pages(memory) and not pages.lock_pages(memory)
    pages.unlock_pages(memory)
    assert len(said) == 1 and "page-locking is refused here (CUDA error 2, ulimit -l is" in said[0]
    monkeypatch.setattr("everystep.session.page_lock_refusals", said)
    net = model()
    with everystep.attach(net, sgd(net), run=tmp_path / "run") as training:
        assert said[0] in training.status()["limitations"]


@pytest.mark.parametrize(
    "which, name, ulimit",
    [
        (resource.RLIMIT_FSIZE, "RLIMIT_FSIZE", "ulimit -f"),
        (resource.RLIMIT_AS, "RLIMIT_AS", "ulimit -v"),
    ],
)
def test_a_limit_is_told_as_such(which: int, name: str, ulimit: str, tmp_path: Path) -> None:
    """More memory, or another arena_dir, would not help."""
    size = 64 << 20
    arenas = [None, str(tmp_path)]

    def allocate() -> str:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        least = size // 2 + (mapped if which == resource.RLIMIT_AS else 0)
        resource.setrlimit(which, (least, least))
        told = []
        for arena in arenas:
            with pytest.raises(NotEnoughMemory) as caught:
                SharedMemory.create(size, "ring", arena)
            told.append(str(caught.value))
        notes = findings()
        return "\n".join((*told, notes))

    said = in_a_child(allocate)
    assert said.count(f"by {name}\nhint: raise it where the trainer is started ({ulimit}") == 2
    assert f"note: {name} is" in said and "arena_dir" not in said


def test_memory_of_a_shadow_that_a_limit_keeps_from_being_mapped(tmp_path: Path) -> None:
    memory = SharedMemory.create(64 << 20, "replica")

    def map_it() -> object:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (8 << 20),) * 2)
        return SharedMemory(memory.fd)

    assert "NotEnoughMemory: map 64.0 MiB of shared memory" in (said := in_a_child(map_it))
    assert "RLIMIT_AS" in said


def test_attach_under_a_file_size_limit(tmp_path: Path) -> None:
    def attach() -> object:
        net = model()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        return everystep.attach(net, sgd(net), run=tmp_path / "run")

    said = in_a_child(attach)
    assert said.startswith("NotEnoughMemory") and "RLIMIT_FSIZE" in said and "ulimit -f" in said

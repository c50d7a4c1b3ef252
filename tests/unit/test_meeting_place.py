"""Meeting places: private, the same for every process of a user, and lasting; the lock that lies there."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from everystep.errors import LaneError, LaneTimeout, RunBusy
from everystep.lane import lock as locks
from everystep.lane import place
from everystep.lane.control import AskRetire, AskStatus, ControlServer, ask
from everystep.lane.descriptors import DescriptorServer, receive_descriptors
from everystep.lane.host import process_start
from everystep.lane.lock import TrainerLock
from everystep.lane.runtime import ShadowCard, living_cards, read_card, runtime_dir, write_card
from everystep.process import retire
from everystep.recover.meet import hold_run

ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
NOBODY = 65534


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Two of our own instead of /tmp and its like; EVERYSTEP_RUNTIME_DIR is not set."""
    short = Path(tempfile.mkdtemp(prefix="es-"))
    short.chmod(0o755)
    made = [short / "a", short / "b"]
    for folder in made:
        folder.mkdir()
        folder.chmod(0o1777)
    monkeypatch.setattr(place, "PLACES", tuple(map(str, made)))
    monkeypatch.delenv("EVERYSTEP_RUNTIME_DIR")
    yield [folder / f"everystep-{os.getuid()}" for folder in made]
    shutil.rmtree(short)


def card(folder: Path, run: str = "") -> ShadowCard:
    pid = os.getpid()
    return ShadowCard(pid, process_start(pid), "", f"{folder}/x", run=run)


def test_the_environment_does_not_decide_where_to_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EVERYSTEP_RUNTIME_DIR")
    met = []
    try:
        for name in ("one", "two"):
            (tmp_path / name).mkdir(mode=0o700)
            for variable in ("TMPDIR", "XDG_RUNTIME_DIR", "HOME"):
                monkeypatch.setenv(variable, str(tmp_path / name))
            monkeypatch.setattr(tempfile, "tempdir", None)
            met.append(runtime_dir(str(tmp_path / "run")))
        assert met[0] == met[1]
    finally:
        for folder in set(met):
            folder.rmdir()


def test_one_run_under_all_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    monkeypatch.chdir(tmp_path)
    names = ["run", "link", "./link/", str(tmp_path / "run"), str(tmp_path / "link" / ".." / "run")]
    assert len({runtime_dir(name) for name in names}) == 1


def test_a_private_folder_is_made(places: list[Path], tmp_path: Path) -> None:
    folder = runtime_dir(str(tmp_path / "run"))
    for made in (places[0], folder):
        assert made.stat().st_mode & 0o7777 == 0o700
    places[0].chmod(0o755)  # as one may have made it by hand: ours, and only readable
    assert runtime_dir(str(tmp_path / "run")) == folder
    assert places[0].stat().st_mode & 0o7777 == 0o700


def a_link(folder: Path) -> None:
    target = folder.parent / "elsewhere"
    target.mkdir(mode=0o700)
    folder.symlink_to(target)


def a_file(folder: Path) -> None:
    folder.touch()


def writable_by_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)


def foreign(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)


def without_sticky_bit(folder: Path) -> None:
    folder.parent.chmod(0o777)


@pytest.mark.parametrize(
    "spoil",
    [a_link, a_file, writable_by_others, pytest.param(foreign, marks=ROOT), without_sticky_bit],
)
def test_a_place_that_is_not_ours_is_passed_over(
    spoil: object, places: list[Path], tmp_path: Path
) -> None:
    spoil(places[0])  # type: ignore[operator]
    assert runtime_dir(str(tmp_path / "run")).parent == places[1]
    assert not list((places[0].parent / "elsewhere").glob("*")), "something was put behind a link"
    shutil.rmtree(places[1])
    spoil(places[1])  # type: ignore[operator]
    with pytest.raises(LaneError, match="no place") as caught:
        runtime_dir(str(tmp_path / "run"))
    assert all(str(folder.parent) in str(caught.value) for folder in places)
    assert "EVERYSTEP_RUNTIME_DIR" in (caught.value.hint or "")


def test_a_place_that_was_chosen_is_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chosen").mkdir()
    (tmp_path / "chosen").chmod(0o775)
    monkeypatch.setenv("EVERYSTEP_RUNTIME_DIR", str(tmp_path / "chosen"))
    with pytest.raises(LaneError, match="mode 0775"):
        runtime_dir("run")


def test_who_meets_at_the_second_place_is_still_found(places: list[Path], tmp_path: Path) -> None:
    """The first one was taken by another user when the run began, and is free now."""
    writable_by_others(places[0])
    run = str(tmp_path / "run")
    folder = runtime_dir(run)
    write_card(folder, card(folder, run))
    places[0].rmdir()
    assert runtime_dir(run) == folder
    assert [c.run for c in living_cards()] == [run]
    with holder(folder) as trainer:
        (folder / "shadow.json").unlink()  # its shadow has died, and a new one is not there yet
        assert runtime_dir(run) == folder
        with pytest.raises(RunBusy, match=f"held by pid {trainer.pid} "):
            hold_run(tmp_path / "run")
    assert runtime_dir(run).parent == places[0], "nobody is at the second one any more"
    lock = TrainerLock(folder, run)  # by this process, which must not lose it by looking
    for _ in range(2):
        assert runtime_dir(run) == folder
    with pytest.raises(AssertionError), holder(folder):
        pass
    lock.close()
    assert runtime_dir(run).parent == places[0]


@pytest.mark.parametrize(
    "spoil", [a_link, a_file, writable_by_others, pytest.param(foreign, marks=ROOT)]
)
def test_a_lock_is_not_made_anew_in_what_took_the_place_of_its_root(
    spoil: Callable[[Path], None], places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_LOOK_SECONDS", 0)
    folder = runtime_dir("run")
    lock = TrainerLock(folder, "run")
    shutil.rmtree(places[0])
    assert lock.taken_by() == lock.problem == "" and (folder / "trainer.lock").exists()
    for made in (places[0], folder):
        assert made.stat().st_mode & 0o7777 == 0o700
    shutil.rmtree(places[0])
    spoil(places[0])
    before = sorted(places[0].parent.rglob("*"))
    with pytest.raises(LaneError, match=str(places[0])):
        place.remake(folder)
    assert lock.taken_by() == "" and str(places[0]) in lock.problem
    assert sorted(places[0].parent.rglob("*")) == before, "something was made there"
    if places[0].is_dir() and not places[0].is_symlink():
        shutil.rmtree(places[0])
    else:
        places[0].unlink()
    assert lock.taken_by() == lock.problem == "" and (folder / "trainer.lock").exists()
    lock.close()


def test_nobody_is_asked_or_believed_in_a_folder_of_others(places: list[Path]) -> None:
    """Whoever took the place of one that was removed could name any process as a shadow."""
    folder = runtime_dir("run")
    shown = card(folder, "run")
    write_card(folder, shown)
    assert read_card(folder) == shown
    control = ControlServer(f"ipc://{folder}/x.control")
    try:
        places[0].chmod(0o777)
        assert read_card(folder) is None
        with pytest.raises(LaneError, match=r"retire: .*others may write to it"):
            ask(f"ipc://{folder}/x.control", AskRetire(), timeout_seconds=20)
        assert control.receive() is None
    finally:
        control.socket.close()


HOLD = """
import sys
from pathlib import Path
from everystep.lane.lock import TrainerLock
lock = TrainerLock(Path(sys.argv[1]), "run")
print("held", flush=True)
sys.stdin.readline()
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_lock_outlives_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_LOOK_SECONDS", 0)
    folder = runtime_dir("run")
    ours = TrainerLock(folder, "run")
    path = folder / "trainer.lock"
    with pytest.raises(RunBusy, match="this process"):
        TrainerLock(folder, "run")
    for remove in (path.unlink, lambda: (path.unlink(), folder.rmdir()), lambda: _replace(path)):
        remove()
        assert ours.taken_by() == ""
        with pytest.raises(AssertionError), holder(folder):
            pass  # it cannot have it
    path.unlink()
    with holder(folder) as other:
        assert ours.taken_by() == "", "a command may hold it for a moment"
        monkeypatch.setattr(locks, "_TAKEN_SECONDS", 0)
        assert f"pid {other.pid}" in ours.taken_by()
    ours.close()
    TrainerLock(folder, "run").close()


def _replace(path: Path) -> None:
    path.unlink()
    path.touch()


def test_a_forked_process_does_not_end_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Holder:
        ended = False

        def end(self) -> None:
            self.ended = True

    folder, holder = runtime_dir("run"), Holder()
    ours = TrainerLock(folder, "run")
    ours.hold_for(holder.end)
    child = os.fork()
    if child == 0:
        TrainerLock.end_earlier(folder)
        refused = False
        try:
            TrainerLock(folder, "run")
        except RunBusy as error:
            refused = "held by pid" in str(error)
        os._exit(0 if refused and not holder.ended else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    TrainerLock.end_earlier(folder)
    assert holder.ended
    TrainerLock(folder, "run").close()


def test_a_lock_is_kept_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_LOOK_SECONDS", 0)
    lock = TrainerLock(runtime_dir("run"), "run")
    path = runtime_dir("run") / "trainer.lock"
    os.utime(path, (1, 1))
    assert lock.taken_by() == "" and path.stat().st_mtime == 1, "not at every seal"
    monkeypatch.setattr(locks, "FRESH_SECONDS", 0)
    assert lock.taken_by() == "" and path.stat().st_mtime > 1
    lock.close()


def as_nobody(work: Callable[[], int]) -> int:
    """What a process of another user counts; a fork, because it may not even start Python here."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def descriptors_from(path: Path) -> int:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(10)
        peer.connect(str(path))
        return len(socket.recv_fds(peer, 1, 9)[1])


def answers_from(path: Path) -> int:
    asker = zmq.Context().socket(zmq.REQ)
    asker.linger = 0
    asker.connect(f"ipc://{path}")
    asker.send(msgspec.msgpack.encode(AskStatus(exact=True)))
    return asker.poll(300)


@ROOT
def test_sockets_serve_this_user_alone(places: list[Path]) -> None:
    """Even where the folder lets others in."""
    folder = places[0].parent
    server = DescriptorServer(folder / "memory")
    (folder / "memory").chmod(0o777)
    done = threading.Event()

    def serve() -> None:
        while not done.wait(0.01):
            server.serve([0])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert as_nobody(lambda: descriptors_from(folder / "memory")) == 0
        (fd,) = receive_descriptors(str(folder / "memory"), 1)
        os.close(fd)
        assert server.refused == 1
    finally:
        done.set()
        thread.join()
        server.close()
    control = ControlServer(f"ipc://{folder}/control")
    (folder / "control").chmod(0o777)
    try:
        assert as_nobody(lambda: answers_from(folder / "control")) == 0
        assert control.receive() is None, "another user's request was taken in"
        assert answers_from(folder / "control") == 0  # nobody answers it, but
        assert control.receive() is not None
    finally:
        control.socket.close()


def test_listening_anew_is_tried_until_it_succeeds(tmp_path: Path) -> None:
    """The folder is gone for a moment: nothing is given up for what cannot be had yet."""
    folder = Path(tempfile.mkdtemp(prefix="es-"))
    server, control = (
        DescriptorServer(folder / "memory"),
        ControlServer(f"ipc://{folder}/x.control"),
    )
    try:
        shutil.rmtree(folder)
        for _ in range(2):
            with pytest.raises(OSError):
                server.bind_again()
            with pytest.raises(LaneError, match="listen again"):
                control.bind_again()
        assert server.socket.fileno() >= 0 and control.fileno() >= 0
        folder.mkdir()
        server.bind_again()
        control.bind_again()
        assert {path.name for path in folder.iterdir()} == {"memory", "x.control"}
        thread = threading.Thread(target=lambda: receive_descriptors(str(folder / "memory"), 1))
        thread.start()
        while thread.is_alive():
            server.serve([0])
        assert answers_from(folder / "x.control") == 0 and control.receive() is not None
    finally:
        server.close()
        control.socket.close()
        shutil.rmtree(folder)


@ROOT
def test_memory_is_not_taken_from_another_user(places: list[Path]) -> None:
    path = places[0].parent / "memory"
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    os.seteuid(NOBODY)  # who listens is what it was when it began to
    try:
        server.listen(1)
    finally:
        os.seteuid(0)
    with server, pytest.raises(LaneError, match="another user"):
        receive_descriptors(str(path), 1)


def test_an_unkillable_shadow_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It waits in the kernel, or belongs to somebody else: no wait is without end."""
    for name in ("_PATIENCE_SECONDS", "_KILLED_SECONDS"):
        monkeypatch.setattr(retire, name, 0.05)
    sleeper = subprocess.Popen(["sleep", "60"])
    address = f"ipc://{tmp_path}/x.control"
    it = ShadowCard(sleeper.pid, process_start(sleeper.pid), address, f"{tmp_path}/x.memory")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(retire.os, "kill", lambda *_: None)
            with pytest.raises(LaneTimeout, match=f"shadow {sleeper.pid}: it lives .* [(]state"):
                retire.retire(it)

            def refuse(*_: object) -> None:
                raise PermissionError(1, "Operation not permitted")

            patch.setattr(retire.os, "kill", refuse)
            with pytest.raises(LaneError, match="may not be killed"):
                retire.retire(it)
        monkeypatch.setattr(retire, "_KILLED_SECONDS", 30)
        reaper = threading.Thread(target=sleeper.wait)
        reaper.start()
        retire.retire(it)
        reaper.join()
    finally:
        sleeper.kill()
        sleeper.wait()

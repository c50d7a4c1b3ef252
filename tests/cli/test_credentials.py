"""What somebody put into a bucket's URL, or into the environment for it, is never shown: not by a command, an
error, a log line or a status, neither in the trainer nor by its shadow."""

from __future__ import annotations

import logging
import socket
import time
import traceback
from pathlib import Path

import pytest
import torch
from bucket.hosts import Host
from bucket.server import free_port, point_at
from torch import nn, optim
from typer.testing import CliRunner

import everystep
from everystep.cli.app import app
from everystep.errors import EverystepError, StoreError, UsageError
from everystep.lane.runtime import runtime_dir
from everystep.store.bucket.client import Bucket
from everystep.store.bucket.tiers import local_dir
from everystep.text import redacted

SECRETS = ("SECRET", "hidden", "AKIA", "sig=")
# what AWS makes of secrets holds '/' and '+'; whoever pastes one in does not escape it
URLS = {
    "s3://AKIA:SECRET@bucket/prefix?token=hidden": "s3://bucket/prefix",
    "s3://AKIA:ab/SECRET@bucket/prefix": "s3://bucket/prefix",
    "s3://AKIA:a?SECRET@bucket/prefix/": "s3://bucket/prefix",
    "s3://AKIA:a#SECRET@bucket/prefix": "s3://bucket/prefix",
    "s3://AKIA:SEC@RET/SECRET@bucket/prefix": "s3://bucket/prefix",
    "s3://AKIA:SECRET@[x/y?hidden": "s3://[x/y",
    "gs://SECRET@bucket/prefix#hidden": "gs://bucket/prefix",
    "az://AKIA:12/SECRET@c/p?sig=SECRET": "az://c/p",
    "file://AKIA:SECRET@/folder/b?hidden": "file:///folder/b",
    "s3://bucket/who@where/x": "s3://bucket/who@where/x",
    "s3://bucket": "s3://bucket",
    "file:///a/b%20c/": "file:///a/b%20c",
}


def clean(said: str, what: object = "") -> None:
    for secret in SECRETS:
        assert secret not in said, f"{what}: {secret} in {said}"


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("EVERYSTEP_LOCAL_DIR", str(tmp_path / "local"))
    return f"file://AKIA:SECRET@{tmp_path}/bucket?token=hidden&sig=SECRET"


@pytest.mark.parametrize("given", URLS)
def test_a_url_as_it_is_shown(given: str) -> None:
    assert redacted(given) == URLS[given]
    clean(str(local_dir(given)))


COMMANDS = {
    **{verb: [verb, "RUN"] for verb in ("ls", "status", "verify", "inspect", "bisect", "stop")},
    "status -v": ["status", "RUN", "-v"],
    "tune": ["tune", "RUN", "--step-time", "0.2s", "--mtbf", "1h"],
    "prune": ["prune", "RUN", "--dry-run"],
    "diff": ["diff", "RUN", "1", "2"],
    "tag": ["tag", "RUN", "2", "best"],
    "export": ["export", "RUN", "2", "--to", "safetensors", "--file", "FILE"],
    "rewind": ["rewind", "RUN", "1", "--yes"],
    "rewind unasked": ["rewind", "RUN", "1"],
    "rewind --take": ["rewind", "RUN", "--take", "bucket", "--yes"],
    "rewind --take unasked": ["rewind", "RUN", "--take", "directory"],
    "rewind --bucket": ["rewind", "file:///else", "--take", "bucket", "--bucket", "RUN"],
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("holds", [False, True], ids=["nothing there", "a run there"])
def test_a_command_does_not_show_them(
    name: str, holds: bool, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if holds:
        host = Host(tmp_path / "a", f"file://{tmp_path}/bucket", keep=3)
        host.commit(1, 2, 3)
        host.ship()
    given = {"RUN": url, "FILE": str(tmp_path / "file")}
    with caplog.at_level(logging.DEBUG):
        for json in ([], ["--json"]):
            words = [given.get(word, word) for word in COMMANDS[name]]
            done = CliRunner().invoke(app, [*words, *json])
            assert done.exception is None or isinstance(done.exception, SystemExit)
            clean(done.output, words)
    assert f"file://{tmp_path}/bucket" in done.output or name not in ("ls", "status", "tune")
    clean(caplog.text)


@pytest.mark.parametrize("given", [*URLS, "ftp://u:SECRET@host/x?hidden"])
def test_an_error_does_not_say_them(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does what it was raised from, which Python prints with it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    for operation in (Bucket, everystep.open_run):
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr("everystep.store.bucket.cloud._bounds", lambda: NO_TRIES)
            try:
                operation(given)
            except EverystepError as error:
                clean("".join(traceback.format_exception(error)))


NO_TRIES = {
    "client_options": {"timeout": "1s", "allow_http": True},
    "retry_config": {"max_retries": 0},
}


def test_a_trainer_and_its_shadow_do_not_show_them(
    url: str,
    tmp_path: Path,
    runtime: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = nn.Linear(4, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    refusals = [
        {"run": url, "bucket": f"file://AKIA:SECRET@{tmp_path}/else?hidden"},
        {"run": f"{url}\udc80"},
        {"run": tmp_path / "other", "bucket": f"{url}\udc80"},
        {"run": "ftp://AKIA:SECRET@host/x?hidden"},
    ]
    with caplog.at_level(logging.DEBUG):
        for given in refusals:
            with pytest.raises(EverystepError) as refusal:
                everystep.attach(model, optimizer, **given)
            clean("".join(traceback.format_exception(refusal.value)), given)
        with everystep.attach(model, optimizer, run=url, on_failure="raise") as run:
            for _ in run.steps(2):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                run.flush()
            status = run.status()
            process = Path(f"/proc/{status['pid']}")
            for shown in (status, run, model, optimizer, vars(run)):  # whoever prints it
                clean(repr(shown))
            for file in ("cmdline", "environ", "comm"):
                clean((process / file).read_text(errors="replace"), file)
            assert "everystep.shadow" in (process / "cmdline").read_text(), "it does not hide"
            assert status["bucket"]["url"] == f"file://{tmp_path}/bucket"
            (tmp_path / "bucket").rename(tmp_path / "gone")
            (tmp_path / "bucket").write_bytes(b"no folder")
            deadline = time.monotonic() + 60
            while not run.status()["bucket"]["last_error"]:
                assert time.monotonic() < deadline
                run.flush()
                time.sleep(0.1)
            clean(repr(run.status()))
            (tmp_path / "bucket").unlink()
            (tmp_path / "gone").rename(tmp_path / "bucket")
            while run.status()["problem"]:  # who closes before it was tried again is told
                assert time.monotonic() < deadline
                time.sleep(0.1)
    clean(caplog.text)
    assert str(run.path) in caplog.text
    clean((runtime_dir(str(run.path)) / "shadow.log").read_text())
    clean("".join(capfd.readouterr()))
    clean("".join(map(str, tmp_path.rglob("*"))))


def test_plain_http_is_for_who_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever listens on the way would read weights, and could send others."""
    for name in ("AWS_ALLOW_HTTP", "ALLOW_HTTP"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        for name, value in point_at(server.getsockname()[1]).items():
            if name != "AWS_ALLOW_HTTP":
                monkeypatch.setenv(name, value)
        with pytest.raises(StoreError, match="HTTP error"):
            Bucket("s3://bucket/prefix").read("commits")
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_url_that_is_none() -> None:
    with pytest.raises(UsageError, match="s3://"):
        Bucket("s3://[x/y")
    done = CliRunner().invoke(app, ["ls", "s3://[x/y"])
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), done.output
    assert "error: run s3://[x/y" in done.output and "hint: write s3://bucket/prefix" in done.output
    with pytest.raises(UsageError, match="environment"):
        Bucket("s3://AKIA:ab/SECRET@bucket/prefix")

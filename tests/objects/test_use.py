"""Object stores as they are used: single saves, the command line, what is refused, requests, and secrets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import traceback
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from obstore import exceptions

import aiockpt
from aiockpt.storage import storage_for
from benchmarks.harness.object_server import ObjectServer, Rule
from tests.objects.buckets import Bucket


@pytest.fixture(scope="module")
def large() -> dict[str, Any]:
    """Return a state that is sent in parts."""
    return {"x": torch.arange(12_000_000.0), "y": torch.arange(7), "n": 3}


def test_a_save_takes_its_parts_and_five_requests(bucket: Bucket, server: ObjectServer, large: dict[str, Any]) -> None:
    with bucket.checkpointer() as ckpt:
        ckpt.save(large, bucket / "run/0")  # the first one finds out what the store can do
        server.rules()
        ckpt.save(large, bucket / "run/1")
        files = [line for line in server.log if "/files/" in line and not line.startswith("GET")]
        others = [line for line in server.log if line not in files]
        # A list and a state at the same time, twice; then the commit.
        assert sorted(line.split(" ")[0] for line in others) == ["GET", "GET", "PUT", "PUT", "PUT"], others
        assert others[-1].endswith("/.metadata")
        server.rules()
        with ckpt.open(bucket / "run/1") as reader:
            assert list(reader) == ["x", "y", "n"]
            assert len(server.log) <= 3
            server.rules()
            rows = reader.read("x", slice(5_000_000, 5_000_100))
        assert torch.equal(rows, large["x"][5_000_000:5_000_100])
        assert len(server.log) == 1


@pytest.mark.full
def test_command_line(server: ObjectServer, large: dict[str, Any]) -> None:
    bucket = Bucket("s3://commands", server.options("s3"))
    with bucket.checkpointer() as ckpt:
        ckpt.save(large, bucket / "run/c")
    given = {
        "ENDPOINT": server.url,
        "REGION": "r",
        "ACCESS_KEY_ID": "a",
        "SECRET_ACCESS_KEY": "s",
        "ALLOW_HTTP": "true",
    }
    env = os.environ | {f"AWS_{name}": value for name, value in given.items()}
    for command, expected in {"ls": "complete", "verify": "", "inspect": "x", "clean": "", "rm --yes": ""}.items():
        argv = [sys.executable, "-m", "aiockpt", *command.split(), bucket / "run/c"]
        done = subprocess.run(argv, env=env, text=True, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, (command, done.stderr)
        assert expected in done.stdout
    assert "run/c/.metadata" not in bucket.listed()
    with bucket.checkpointer() as ckpt:
        assert len(ckpt.clean(bucket / "run")) == 1, "those who read it had time until now"
    assert bucket.listed() == []


def test_what_cannot_be_is_refused_with_the_way_out(bucket: Bucket, large: dict[str, Any]) -> None:
    with bucket.checkpointer() as ckpt:
        ckpt.save(large, bucket / "c")
        with pytest.raises(aiockpt.LoadError, match="can't be mapped; load it without mmap=True"):
            ckpt.load(bucket / "c", mmap=True)
        with pytest.raises(aiockpt.CheckpointNotFoundError, match=re.escape(bucket / "d")):
            ckpt.load(bucket / "d")
    wrong = pytest.raises(aiockpt.AiockptError, match=r"'nonsense' is not valid.*see storage_options")
    with aiockpt.SyncCheckpointer(storage_options=bucket.options | {"nonsense": 1}) as ckpt, wrong:
        ckpt.load(bucket / "c")


PLAIN_HTTP = {"client_options": {"allow_http": True}}
DENIED = {
    "no bucket": ("nothing", 0, "does not exist, or not at this endpoint"),
    "wrong key": (".", 403, "access is denied.*look at the credentials and their rights"),
    "wrong region": (".", 301, "the region or the endpoint in storage_options is not that of this bucket"),
    "no list": ("GET .*list-type", 403, "access is denied"),
    "only reads": ("(PUT|POST|DELETE) ", 403, "access is denied"),
}


@pytest.mark.parametrize("case", DENIED)
def test_what_will_never_succeed_is_told_at_once(case: str, server: ObjectServer) -> None:
    match, status, said = DENIED[case]
    bucket = Bucket(
        f"s3://no-bucket-{uuid.uuid4().hex}" if case == "no bucket" else "s3://denied", server.options("s3")
    )
    with bucket.checkpointer() as ckpt:
        server.rules(Rule(match, count=10**6, status=status))
        for name in ("c", "m.safetensors"):
            with pytest.raises(aiockpt.SaveError, match=f"{bucket.url}.*{said}"):
                ckpt.save({"x": torch.arange(3)}, bucket / name)
        assert len(server.log) <= 30, server.log  # of which a denied one is sent three times
        if "no" in case or case == "wrong key":
            with pytest.raises(aiockpt.LoadError, match=f"{bucket.url}.*{said}"):
                ckpt.load(bucket / "c")
        server.rules(Rule(match, count=10**6, status=status))
        locked = pytest.raises(aiockpt.AiockptError, match=f"{bucket.url}.*{said}")
        with locked, aiockpt.SyncCheckpointManager(bucket / "run", storage_options=bucket.options) as run:
            run.save(1, {"x": torch.arange(3)})
        assert len(server.log) <= 30, server.log  # of which a denied one is sent three times
        server.rules()


def test_credentials_that_have_expired_are_named(bucket: Bucket, server: ObjectServer, large: dict[str, Any]) -> None:
    """S3 says so with the status 400, and in the answer to a HEAD not at all."""
    with bucket.checkpointer() as ckpt:
        ckpt.save(large, bucket / "c")
        objects = bucket.storage().objects
        server.rules(Rule(".", count=10**6, status=400, code="ExpiredToken"))
        said = f"{bucket.url}.*access is denied: the credentials have expired.*pass credential_provider"
        with pytest.raises(aiockpt.SaveError, match=said):
            ckpt.save(large, bucket / "d")
        with pytest.raises(aiockpt.LoadError, match=said):
            ckpt.load(bucket / "c")
        with pytest.raises(PermissionError, match=said):
            objects.facts("c/.metadata")
        assert any(line.startswith("HEAD") for line in server.log)
        server.rules()


def test_the_environment_is_read_again_once_it_has_changed(server: ObjectServer, monkeypatch) -> None:
    given = server.options("s3")
    for name in ("region", "access_key_id", "secret_access_key"):
        monkeypatch.setenv(f"AWS_{name.upper()}", given.pop(name))
    url = given.pop("endpoint")
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:1")
    options = given | {"retry_config": {"max_retries": 0}}
    with aiockpt.SyncCheckpointer(storage_options=options) as ckpt:
        with pytest.raises(aiockpt.SaveError, match="error sending request"):
            ckpt.save({"x": torch.arange(3)}, "s3://later/c")
        monkeypatch.setenv("AWS_ENDPOINT", url)
        ckpt.save({"x": torch.arange(3)}, "s3://later/c")
        assert ckpt.load("s3://later/c")["x"].tolist() == [0, 1, 2]


class Profile:
    """As the provider of obstore that uses boto3, which reads the file of profiles when it is made."""

    def __init__(self) -> None:
        self._key = Path("~/.aws/credentials").expanduser().read_text()

    def __call__(self) -> dict[str, Any]:
        return {"access_key_id": self._key, "secret_access_key": "s", "expires_at": None}


def test_expired_credentials_are_read_again_from_the_file_of_profiles(
    server: ObjectServer, monkeypatch, tmp_path: Path
) -> None:
    given = {name: value for name, value in server.options("s3").items() if "key" not in name}
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "obstore.auth.boto3", SimpleNamespace(Boto3CredentialProvider=Profile))
    (tmp_path / ".aws").mkdir()
    file = tmp_path / ".aws" / "credentials"
    file.write_text("OLD")
    server.rules(Rule(".", count=10**6, status=400, code="ExpiredToken", signed="OLD"))
    with aiockpt.SyncCheckpointer(storage_options=given) as ckpt:
        with pytest.raises(aiockpt.SaveError, match="the credentials have expired"):
            ckpt.save({"x": torch.arange(3)}, "s3://renewed/c")
        file.write_text("NEW")
        ckpt.save({"x": torch.arange(3)}, "s3://renewed/c")
        assert ckpt.load("s3://renewed/c")["x"].tolist() == [0, 1, 2]
    server.rules()


def test_a_machine_without_credentials_says_so() -> None:
    client = storage_for("s3://b", region="r", endpoint="http://127.0.0.1:1")[0].objects
    text = "Error performing PUT http://169.254.169.254/latest/api/token - status code: 403 Forbidden"
    error = client._error("c", exceptions.GenericError(text))
    assert isinstance(error, PermissionError)
    assert "s3://b/c: access is denied: no credentials are in storage_options" in str(error)


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"allow_http": True},
            {"config": {"x": "y"}},
            {"client_options": True},
            {"retry_config": 5},
            {"grace_s": "x"},
        ),
        *({"endpoint": "not a url"}, {"access_key_id": "a\nb"}, {"token": "a\nb"}, {"region": "a\0b"}),
        {"retry_config": {"max_retries": -1}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_option_that_can_not_be_is_refused(options: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    refused = pytest.raises((aiockpt.AiockptError, ValueError), match=r"see storage_options|grace_s is 'x'")
    options = {
        "access_key_id": "a",
        "secret_access_key": "b",
        "region": "c",
        "endpoint": "http://127.0.0.1:1",
    } | options
    with aiockpt.SyncCheckpointer(storage_options=options) as ckpt:
        with refused:
            ckpt.load("s3://b/c")
        with refused:
            ckpt.save({"x": 1}, "s3://b/c")
    capfd.readouterr()  # of a panic in Rust


@pytest.mark.parametrize("options", [[("a", 1)], {5: 1}])
def test_storage_options_are_a_dict_of_names(options: Any) -> None:
    with pytest.raises(TypeError, match="storage_options must be a dict"):
        aiockpt.load("s3://b/c", storage_options=options)


@pytest.mark.parametrize("url", ["s3://me:hidden@b/c", "gs://hidden@b/c"])
def test_credentials_in_a_url_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(aiockpt.AiockptError, match="credentials belong in storage_options") as caught:
        aiockpt.load(url)
    assert "hidden" not in repr(caught.value)


@pytest.mark.parametrize("name", ["c\n", "a\0b", "a\x7f", "\udcff"])
def test_what_no_object_can_be_named_is_refused(name: str) -> None:
    with pytest.raises(aiockpt.AiockptError, match="has characters that no name of an object has"):
        aiockpt.load(f"s3://b/{name}", storage_options={"region": "r"})


def test_a_short_secret_is_not_masked_within_words() -> None:
    client = storage_for("s3://b", region="r", access_key_id="k", secret_access_key="s", token="not-so-short")[
        0
    ].objects
    text = str(client._error("c", exceptions.GenericError("this is s=s, and not-so-shorter")))
    assert "this is ***=***, and ***er" in text


def test_the_cause_of_a_failed_connection_is_told() -> None:
    options = {"region": "r", "access_key_id": "a", "secret_access_key": "b", "retry_config": {"max_retries": 0}}
    with pytest.raises(aiockpt.LoadError, match=r"http://127\.0\.0\.1:1/.* \(Connection refused\)"):
        aiockpt.load("s3://b/c", storage_options=options | {"endpoint": "http://127.0.0.1:1"} | PLAIN_HTTP)


def test_who_may_not_delete_loses_nothing(bucket: Bucket, server: ObjectServer, large: dict[str, Any]) -> None:
    with bucket.checkpointer() as ckpt:
        ckpt.save(large, bucket / "c")
        ckpt.save({"x": torch.arange(3)}, bucket / "m.safetensors")
        server.rules(Rule("DELETE|[?]delete", count=10**6, status=403))
        for name in ("c", "m.safetensors"):
            with pytest.raises(aiockpt.DeleteError, match=f"{bucket / name}.*access is denied"):
                ckpt.delete(bucket / name)
        server.rules()
        assert ckpt.load(bucket / "c")["n"] == 3
        assert torch.equal(ckpt.load(bucket / "m.safetensors")["x"], torch.arange(3))
        ckpt.save(large, bucket / "c", overwrite=True)
        ckpt.delete(bucket / "m.safetensors")
        assert ckpt.verify(bucket / "c").ok


@pytest.mark.main
def test_what_is_there_is_said(bucket: Bucket) -> None:
    """Checkpoints within checkpoints, and objects of others."""
    small = {"x": torch.arange(9.0), "y": torch.arange(7), "n": 3}
    objects = bucket.storage().objects
    objects.put("notes/a.txt", b"a")
    objects.put("model", b"an object of this name")
    with bucket.checkpointer() as first:
        first.save(small, bucket / "c")
        first.save(small, bucket / "run/step-1")
    with bucket.checkpointer() as ckpt:
        for name, match in {
            "model": "is one object; delete it before, or save under another name",
            "c/inner": f"is within the checkpoint {bucket / 'c'}: save under another name",
            "c/inner/most": f"is within the checkpoint {bucket / 'c'}: save under another name",
            "run": f"other objects below it, such as {bucket / 'run/step-1/.metadata'}",
            "notes": f"other objects below it, such as {bucket / 'notes/a.txt'}",
        }.items():
            for overwrite in (False, True):
                with pytest.raises(aiockpt.CheckpointExistsError, match=re.escape(match)):
                    ckpt.save(small, bucket / name, overwrite=overwrite)
    assert objects.get("model")[1] == b"an object of this name"
    assert bucket.dead() == ["model", "notes/a.txt"]


class _Texts(aiockpt.Observer):
    """Keeps the text of each event, with what it is about."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def written(self, *about: object) -> None:
        self.of["written"] = repr(about)

    def failed(self, *about: object) -> None:
        self.of["failed"] = repr(about) + str(about[-1])

    def loaded(self, *about: object) -> None:
        self.of["loaded"] = repr(about)

    def deleted(self, *about: object) -> None:
        self.of["deleted"] = repr(about)


def test_credentials_are_in_no_text(
    bucket: Bucket, server: ObjectServer, caplog: pytest.LogCaptureFixture, large: dict[str, Any]
) -> None:
    caplog.set_level(0)
    secret = "not-so-secret"
    options = bucket.options | {"secret_access_key": secret} if bucket.url.startswith("s3") else bucket.options
    observer = _Texts()
    with aiockpt.SyncCheckpointer(storage_options=options, observers=[observer]) as ckpt:
        ckpt.save(large, bucket / "c")
        texts = [repr(ckpt), repr(aiockpt.storage.storage_for(bucket / "c", **options))]
        with ckpt.open(bucket / "c") as reader:
            texts.append(repr(reader))
        ckpt.load(bucket / "c")
        server.rules(Rule("(PUT|POST) .*/files/", count=10**6, status=403))
        with pytest.raises(aiockpt.WriteError) as refused:
            ckpt.save(large, bucket / "d")
        server.rules()
        objects = bucket.storage().objects
        stored = b"".join(objects.get(key)[1] for key in bucket.listed())
        ckpt.delete(bucket / "c")
    assert observer.of.keys() == {"written", "failed", "loaded", "deleted"}
    texts += [caplog.text, *observer.of.values(), "".join(traceback.format_exception(refused.value))]
    assert secret not in "".join(texts)
    assert secret.encode() not in stored


def test_a_long_run_is_listed_by_few_requests(server: ObjectServer) -> None:
    """Each step is a commit object and its files; those of 1,000 steps are copies of one."""
    bucket = Bucket("s3://long", server.options("s3"))
    state = {"x": torch.arange(10)}
    with bucket.checkpointer() as ckpt:
        for step in (0, 1):
            facts = {"step": step, "metrics": {"loss": 0.5}}
            ckpt.save(state, bucket / f"run/step-{step:08d}", metadata={"run": facts})
    objects = bucket.storage().objects
    copied = {name: objects.get(f"run/step-00000000/{name}")[1] for name in objects.below("run/step-00000000/")}
    for step in range(2, 1000):
        for name, data in copied.items():
            objects.put(f"run/step-{step:08d}/{name}", data)
    with aiockpt.SyncCheckpointManager(bucket / "run", read_only=True, storage_options=bucket.options) as run:
        server.rules()
        latest = run.latest()
        assert latest is not None
        assert (latest.step, latest.state, dict(latest.metrics)) == (999, "complete", {"loss": 0.5})
        assert len(server.log) <= 3, server.log
        assert [info.step for info in run.infos()] == list(range(1000))
        server.rules()
        assert {info.state for info in run.infos()} == {"complete"}
        assert len(server.log) <= 6, server.log
        with bucket.checkpointer() as ckpt:
            facts = {"metrics": {"loss": 0.25}}
            ckpt.save(state, bucket / "run/step-00000999", metadata={"run": facts}, overwrite=True)
        server.rules()
        assert dict(run.infos()[999].metrics) == {"loss": 0.25}
        assert len(server.log) <= 7, server.log
        objects.delete(["run/step-00000500/.metadata"])
        assert sorted(set(range(1000)) - set(run.steps())) == [500]


@pytest.mark.main
def test_a_large_checkpoint_is_opened_by_few_requests(bucket: Bucket, server: ObjectServer) -> None:
    state = {f"layer.{at}.weight": torch.full((3,), float(at)) for at in range(10_000)}
    with bucket.checkpointer() as ckpt:
        ckpt.save(state, bucket / "c")
    with bucket.checkpointer() as ckpt:
        server.rules()
        with ckpt.open(bucket / "c") as reader:
            assert len(reader) == 10_000
            assert len(server.log) <= 3, server.log
            assert torch.equal(reader.read("layer.7001.weight"), state["layer.7001.weight"])


def test_credentials_that_expire_within_a_save(server: ObjectServer, large: dict[str, Any]) -> None:
    """The provider is asked again; what it raises ends the save, and is shown."""
    bucket = Bucket(f"s3://{uuid.uuid4().hex}", server.options("s3"))
    given = {
        name: value for name, value in bucket.options.items() if name not in ("access_key_id", "secret_access_key")
    }
    calls: list[int] = []

    def provide() -> dict[str, Any]:
        calls.append(1)
        if len(calls) > most:
            raise PermissionError("the role was revoked")
        soon = datetime.now(UTC) + timedelta(milliseconds=1)
        return {"access_key_id": "a", "secret_access_key": "not-so-secret", "token": "t", "expires_at": soon}

    most = 10**6
    with aiockpt.SyncCheckpointer(storage_options={**given, "credential_provider": provide}) as ckpt:
        ckpt.save(large, bucket / "c")
        assert len(calls) > 1
        most = len(calls) + 2
        with pytest.raises(aiockpt.SaveError, match="the role was revoked") as caught:
            ckpt.save(large, bucket / "d")
        assert "not-so-secret" not in repr(caught.value)
    with bucket.checkpointer() as ckpt:
        assert ckpt.verify(bucket / "c").ok
        assert [name for name in bucket.listed() if name.endswith("/.metadata")] == ["c/.metadata"]
        # Without credentials it could not remove its own files, nor abort uploads.
        ckpt.clean(bucket.url)
    assert bucket.dead() == []
    server.clear()


def test_a_fork_is_refused_with_words(bucket: Bucket) -> None:
    with bucket.checkpointer() as ckpt:
        ckpt.save({"x": torch.arange(3)}, bucket / "c")
    program = (
        "import os, sys, aiockpt\n"
        "path, options = sys.argv[1], eval(sys.argv[2])\n"
        "def load():\n"
        "    with aiockpt.SyncCheckpointer(storage_options=options) as ckpt:\n"
        "        ckpt.load(path)\n"
        "load()\n"
        "if os.fork():\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        "try:\n"
        "    load()\n"
        "except aiockpt.AiockptError as exc:\n"
        "    print(exc, flush=True)\n"
        "    os._exit(7)\n"
    )
    argv = [sys.executable, "-c", program, bucket / "c", repr(bucket.options)]
    done = subprocess.run(argv, text=True, capture_output=True, timeout=120, check=False)
    assert done.returncode == 7, done.stderr
    assert "can't be used in a process that was forked" in done.stdout
    assert "'spawn' or 'forkserver'" in done.stdout


def test_upload_that_fails_before_it_takes_its_parts_gives_them_back(
    bucket: Bucket, server: ObjectServer, large: dict[str, Any]
) -> None:
    options = bucket.options | {"retry_config": {"max_retries": 0}}
    with aiockpt.SyncCheckpointer(storage_options=options, chunk_bytes=8 << 20, staging_bytes=32 << 20) as ckpt:
        for at in range(10):
            server.rules(Rule("POST .*uploads|PUT .*partNumber", count=10**6, status=400, hang_s=at / 500))
            with pytest.raises(aiockpt.SaveError, match="400"):
                ckpt.save(large, bucket / "c")
        server.rules()
        ckpt.save(large, bucket / "c")
        assert ckpt.verify(bucket / "c").ok

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch

import aiockpt
from tests.cli.checkpoints import FORMATS, make, tensors
from tests.commands import invoke
from tests.states import assert_same

TARGETS = {"dcp": "out", "torch": "out.pt", "safetensors": "out.safetensors"}


def load(path):
    with aiockpt.SyncCheckpointer() as ckpt, ckpt.open(path) as reader:
        return reader.read_many()


def same(one, other):
    assert_same(dict(sorted(one.items())), dict(sorted(other.items())))


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("form", FORMATS)
def test_conversion_between_all_formats(form, to, anywhere):
    source, target = make(form, anywhere / "c"), anywhere / TARGETS[to]
    result = invoke("convert", source, target)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{target}: {to}, ")
    same(load(target), tensors())
    assert invoke("diff", source, target).exit_code == 0
    assert invoke("convert", source, anywhere / "named", "--to", to, "--keys", "model", "--keys", "h*").exit_code == 0
    same(load(anywhere / "named"), tensors())


def test_keys_and_dtype(tmp_path):
    source = make("aiockpt", tmp_path / "c")
    target = tmp_path / "m.safetensors"
    assert invoke("convert", source, target, "--keys", "model", "--dtype", "bf16").exit_code == 0
    same(safetensors.torch.load_file(target), {k: v.bfloat16() for k, v in tensors().items() if k != "head"})
    result = invoke("convert", source, tmp_path / "x", "--dtype", "int3")
    assert result.exit_code == 2
    assert "Invalid value for '--dtype': 'int3' is not one of" in result.stderr
    result = invoke("convert", source, tmp_path / "x", "--keys", "model.2")
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert "model.2" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "m.safetensors"]


@pytest.mark.parametrize("to", TARGETS)
def test_existing_checkpoint_is_replaced_only_with_overwrite(to, anywhere):
    source, target = make("aiockpt", anywhere / "c"), anywhere / TARGETS[to]
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"old": torch.ones(1)}, anywhere / "old")
    assert invoke("convert", anywhere / "old", target).exit_code == 0
    result = invoke("convert", source, target)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "--overwrite" in result.stderr
    same(load(target), {"old": torch.ones(1)})
    assert invoke("convert", source, target, "--overwrite").exit_code == 0
    same(load(target), tensors())


@pytest.mark.parametrize("to", TARGETS)
def test_other_directories_are_never_replaced(to, tmp_path):
    source, keep = make("aiockpt", tmp_path / "c"), tmp_path / "letters"
    keep.mkdir()
    (keep / "letter.txt").write_text("dear")
    assert invoke("convert", source, keep, "--to", to, "--overwrite").exit_code == 3
    assert [path.name for path in keep.iterdir()] == ["letter.txt"]


def test_target_inside_the_source_is_refused(anywhere):
    source = make("aiockpt", anywhere / "c")
    targets = [source, source / "m.pt", anywhere]
    if isinstance(anywhere, Path):
        (anywhere / "link").symlink_to(source)
        targets += [anywhere / "link", f"file://{source}"]
    for target in targets:
        result = invoke("convert", source, target, "--overwrite")
        assert result.exit_code == 3
        assert "one lies in the other" in result.stderr
    same(load(source), tensors())


@pytest.mark.kills
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("to", TARGETS)
def test_interrupt_leaves_no_file(to, number, python, tmp_path):
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({f"w{n}": torch.full((3 << 20,), float(n)) for n in range(4)}, tmp_path / "c")
    code = f"""
import os, threading
from aiockpt.cli.main import app
from aiockpt.dcp import convert

def interrupted(fill):  # the second read waits for the signal
    calls = []
    async def wrapper(self, *args):
        calls.append(args)
        if len(calls) == 2:
            os.kill(os.getpid(), {int(number)})
        return await fill(self, *args)
    return wrapper

convert._Filler.fill = interrupted(convert._Filler.fill)
app(["convert", {str(tmp_path / "c")!r}, {str(tmp_path / TARGETS[to])!r}])
"""
    done = subprocess.run([*python, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.slow
def test_bar_shows_the_progress(python, tmp_path):
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({f"w{n}": torch.full((3 << 20,), float(n)) for n in range(8)}, tmp_path / "c")
    code = f"""
from aiockpt.cli import output
from aiockpt.cli.main import app
output._AFTER_S = 0
app(["convert", {str(tmp_path / "c")!r}, {str(tmp_path / "m.pt")!r}])
"""
    terminal, end = pty.openpty()
    with subprocess.Popen([*python, "-c", code], stderr=end, stdout=subprocess.PIPE) as process:
        os.close(end)
        shown = b""
        try:
            while part := os.read(terminal, 4096):
                shown += part
        except OSError:  # how Linux reports that the other end of a terminal is closed
            pass
        os.close(terminal)
        assert process.stdout.read().decode().startswith(str(tmp_path / "m.pt"))
    assert process.returncode == 0
    assert b"writing" in shown


# --- some keys ------------------------------------------------------------------------------------------


def test_keys_are_extracted(anywhere, tmp_path):
    source = make("aiockpt", anywhere / "c")
    for name in ("m.safetensors", "m.pt"):
        result = invoke("convert", source, anywhere / name, "--keys", "model.0.weight", "--keys", "h*d")
        assert result.exit_code == 0, result.output
        same(load(anywhere / name), {k: v for k, v in tensors().items() if k != "model.0.bias"})
    assert invoke("convert", source, tmp_path / "h.pt", "--keys", "model", "--dtype", "float16").exit_code == 0
    found = torch.load(tmp_path / "h.pt", weights_only=True)
    assert {key: value.dtype for key, value in found.items()} == dict.fromkeys(
        ("model.0.weight", "model.0.bias"), torch.float16
    )


def test_objects_are_extracted_into_torch_save_files(tmp_path):
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"model": {"w": torch.ones(2)}, "step": 7, "config": {"lr": [0.5]}}, tmp_path / "c")
    assert invoke("convert", tmp_path / "c", tmp_path / "m.pt", "--keys", "step", "--keys", "config").exit_code == 0
    assert torch.load(tmp_path / "m.pt", weights_only=True) == {"step": 7, "config": {"lr": [0.5]}}
    result = invoke("convert", tmp_path / "c", tmp_path / "m.safetensors", "--keys", "step")
    assert result.exit_code == 3
    assert "step" in result.stderr


def test_extraction_errors(tmp_path):
    source = make("aiockpt", tmp_path / "c")
    result = invoke("convert", source, tmp_path / "m.pt", "--keys", "heads")
    assert result.exit_code == 3
    assert "'head' for 'heads'" in result.stderr
    (tmp_path / "m.pt").write_text("")
    assert invoke("convert", source, tmp_path / "m.pt", "--keys", "head").exit_code == 3
    assert (tmp_path / "m.pt").read_text() == ""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/io")
@pytest.mark.parametrize("name", ["m.safetensors", "m.pt"])
@pytest.mark.parametrize("form", ["aiockpt", "torch", "safetensors"])
def test_only_the_bytes_of_chosen_keys_are_read(form, name, tmp_path):
    state = {f"layer.{n}.w": torch.full((1 << 20,), float(n)) for n in range(12)}
    source = tmp_path / "c"
    match form:
        case "torch":
            torch.save(state, source)
        case "safetensors":
            source = tmp_path / "c.safetensors"
            safetensors.torch.save_file(state, source)
        case _:
            with aiockpt.SyncCheckpointer() as ckpt:
                ckpt.save(state, source)
    invoke("convert", source, tmp_path / f"warm-{name}", "--keys", "layer.0.*")  # so that imports are not counted
    process = psutil.Process()
    before = process.io_counters().read_chars
    result = invoke("convert", source, tmp_path / name, "--keys", "layer.3", "--keys", "layer.7.w")
    read = process.io_counters().read_chars - before
    assert result.exit_code == 0, result.output
    same(load(tmp_path / name), {key: state[key] for key in ("layer.3.w", "layer.7.w")})
    assert 8 << 20 <= read < 9 << 20  # of 48 MiB

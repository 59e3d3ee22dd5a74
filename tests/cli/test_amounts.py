"""Durations and sizes, as texts of options."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

import aiockpt
from tests.commands import invoke


def test_durations(tmp_path):
    """The policy by which a step stays says how it was understood."""
    with aiockpt.SyncCheckpointManager(tmp_path) as run:
        for step in (1, 2):
            run.save(step, {"w": torch.ones(1)})
    for text, seconds in (("3600s", 3600), ("1.5m", 90), ("12h", 43200), ("1d", 86400), ("2w", 1209600)):
        found = json.loads(invoke("prune", tmp_path, "--keep-within", text, "--dry-run", "--json").stdout)
        assert found[0]["because"] == [f"KeepWithin({seconds:g})"]


@pytest.mark.parametrize("text", ["", "h", "3", "0", "1y", "-1h", "nan", "inf", "one"])
def test_invalid_durations(text, tmp_path):
    result = invoke("clean", tmp_path, f"--older-than={text}", env={"COLUMNS": "200"})
    assert (result.exit_code, "is no duration" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("less", "enough"),
    [("16777215", "16777216"), ("15.9M", "16M"), ("16383 KiB", "16384KiB"), ("16383kb", "16384k"), ("0.0156G", "2gb")],
)
def test_sizes(less, enough, tmp_path, monkeypatch):
    """A measurement takes 16 MiB at least."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert invoke("bench", tmp_path, "--size", less).exit_code == 2
    assert invoke("bench", tmp_path, "--size", enough).exit_code == 3


@pytest.mark.parametrize("text", ["", "M", "-1", "1X", "1e3", "nan"])
def test_invalid_sizes(text, tmp_path):
    result = invoke("bench", tmp_path, f"--size={text}", env={"COLUMNS": "200"})
    assert (result.exit_code, "is no size" in result.stderr) == (2, True)

"""Power is lost after each call of a save: in every state of the disk the promised checkpoints are there and load."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.power_doubles import CARES, Care, careless
from tests.crash.power_incidents import INCIDENTS, record_incident
from tests.crash.power_next import next_runs
from tests.crash.power_recordings import Recording, drop_each_sync, record, replay, replays
from tests.crash.zygote import Zygote

QUICK = [
    "first save",
    "overwrite",
    "several in flight",
    "deleting older ones",
    "deltas",
    "one safetensors file (overwrite)",
]


def findings_of(report) -> str:
    return "\n".join(map(str, report.findings))


@pytest.mark.parametrize("name", QUICK)
def test_no_power_cut_breaks_a_promise(zygote: Zygote, tmp_path: Path, name: str) -> None:
    recording = zygote.call(record, name, tmp_path / "c")
    for ordered in (False, True):
        report = replay(recording, ordered=ordered)
        assert not report.findings, findings_of(report)
        assert report.cuts == report.calls + 1
        assert report.distinct >= 2
        assert not report.incomplete


def test_no_power_cut_during_an_overwrite_in_two_steps_breaks_a_promise(zygote: Zygote, tmp_path: Path) -> None:
    """If names can't be exchanged, the new checkpoint is found through its record between the two steps."""
    recording = zygote.call(record, "overwrite in two steps", tmp_path / "c")
    assert "exchange" not in {call.name for call in recording.calls}
    for ordered in (False, True):
        report = replay(recording, ordered=ordered, bound=60, through_hidden=True)
        assert not report.findings, findings_of(report)
    # Without the hidden names it is lost, which proves that states between the two steps were tried.
    assert {finding.found for finding in replay(recording, bound=60).findings} == {"nothing"}
    for number, call in enumerate(recording.calls):
        if call.name == "write" and call.path.endswith("-replaces"):
            lost = replay(recording.without(number), bound=60, through_hidden=True, first_only=True)
            assert lost.findings


def test_every_sync_is_needed(zygote: Zygote, tmp_path: Path) -> None:
    recording: Recording = zygote.call(record, "overwrite", tmp_path / "c")
    strict = drop_each_sync(recording, bound=200, first_only=True)
    kinds = {"a data file", ".metadata", "the manifest", "the hidden directory", "the parent directory"}
    assert {each.what for each in strict} == kinds
    assert [each.what for each in strict if not each.needed] == []
    # If changes of directories reach the disk in order, the sync of the parent also covers the hidden directory.
    ordered = drop_each_sync(recording, ordered=True, bound=200, first_only=True)
    assert {each.what for each in ordered if not each.needed} == {"the hidden directory"}


def test_a_correct_storage_loses_nothing(zygote: Zygote, tmp_path: Path) -> None:
    report = replay(zygote.call(record, "overwrite", tmp_path / "c", careless(None)))
    assert not report.findings, findings_of(report)


@pytest.mark.main
@pytest.mark.parametrize("care", CARES)
def test_a_storage_that_lacks_a_sync_is_detected(zygote: Zygote, tmp_path: Path, care: Care) -> None:
    recording = zygote.call(record, "overwrite", tmp_path / "c", careless(care))
    [finding, *_] = replay(recording, bound=200, first_only=True).findings
    call, missing, name, shows = {
        "sync a data file": ("rename", "bytes ", "d", "can't be loaded"),
        "sync .metadata": ("rename", ".metadata", "d", "can't be loaded"),
        "sync the manifest": ("rename", ".aiockpt.json", "d", "can't be loaded"),
        "sync the hidden directory": ("rename", "the name ", "d", "can't be loaded"),
        "sync the parent directory": ("mark", "the rename of ", "d", "nothing"),
        "sync before it is announced": ("mark", "the rename of ", "d", "nothing"),
        "sync before what it replaced is removed": ("unlink", "the exchange of ", "c", "can't be loaded"),
    }[care]
    assert finding.call is not None
    assert (finding.call.name, finding.name) == (call, name)
    assert shows in finding.found
    assert len(finding.lost) == 1
    assert missing in finding.lost[0]
    assert f"power lost after call {finding.cut} ({call} " in str(finding)


@pytest.mark.parametrize("name", INCIDENTS)
def test_no_power_cut_after_an_incident_breaks_a_promise(zygote: Zygote, tmp_path: Path, name: str) -> None:
    report = replay(zygote.call(record_incident, name, tmp_path / "c"))
    assert not report.findings, findings_of(report)


def test_the_next_run_cleans_up_and_survives_power_cuts(zygote: Zygote, tmp_path: Path) -> None:
    recording = zygote.call(record, "overwrite", tmp_path / "c")
    with replays(recording.scenario) as replaying:
        ends = list(next_runs(zygote, replaying, recording, tmp_path, count=4))
    assert len(ends) == 4
    assert any(not name.startswith("c") for end in ends for name in end.found.content.entries)
    for end in ends:
        assert not end.report.findings, f"{end.found}: {findings_of(end.report)}"
        assert not end.leftovers, f"{end.found}"

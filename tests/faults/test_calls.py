"""Each system call of a save fails at the kernel: either the save fails and says why, or the checkpoint is complete."""

from __future__ import annotations

from pathlib import Path

from tests.crash.zygote import Zygote
from tests.faults.groups import Counts
from tests.faults.plan import QUICK, carry_out


def test_a_failed_call_fails_the_save_or_does_no_harm(zygotes: tuple[Zygote, Zygote], memory: Path) -> None:
    counts = carry_out(QUICK, memory, zygotes)
    assert not counts.wrong, "\n".join(counts.wrong)
    _assert_enough(counts)


def _assert_enough(counts: Counts) -> None:
    assert counts.faults >= 60
    assert counts.faults == counts.failed + counts.saved
    assert counts.failed >= 30
    assert counts.saved >= 20
    struck = {kind for kind, _ in counts.kinds}
    for name in ("mkdir", "create", "allocate", "write", "truncate", "sync", "rename", "exchange", "unlink"):
        assert any(kind.startswith(name) for kind in struck), name

"""What is done right before and right after a checkpoint is published."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
import torch

import aiockpt

STATE = {"w": torch.arange(50_000.0), "step": 3}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["function", "coroutine"])
async def test_they_are_called_with_the_path_before_and_after(tmp_path: Path, kind: str) -> None:
    seen: list[tuple[str, str, bool, int]] = []
    path = tmp_path / "c"

    def note(what: str, where: str) -> None:
        files = list(tmp_path.glob(".c.aiockpt-*/*.distcp"))
        seen.append((what, where, path.exists(), len(files)))

    async def before(where: str) -> None:
        await asyncio.sleep(0)
        note("before", where)

    async def after(where: str) -> None:
        await asyncio.sleep(0)
        note("after", where)

    async with aiockpt.AsyncCheckpointer() as ckpt:
        if kind == "coroutine":
            result = await ckpt.save(STATE, path, pre_commit=before, post_commit=after)
        else:
            result = await ckpt.save(
                STATE, path, pre_commit=lambda w: note("before", w), post_commit=lambda w: note("after", w)
            )
        assert result.post_commit_error is None
        assert seen == [("before", str(path), False, 1), ("after", str(path), True, 0)]
        assert torch.equal((await ckpt.load(path))["w"], STATE["w"])


@pytest.mark.asyncio
async def test_a_hook_that_fails_before_aborts_the_save(tmp_path: Path) -> None:
    async def fails(where: str) -> None:
        raise KeyError("registry")

    async with aiockpt.AsyncCheckpointer() as ckpt:
        with pytest.raises(aiockpt.SaveError, match=r"the pre_commit hook of .*c failed: KeyError: 'registry'") as info:
            await ckpt.save(STATE, tmp_path / "c", pre_commit=fails)
        assert isinstance(info.value.__cause__, KeyError)
        assert not list(tmp_path.iterdir())
        await ckpt.save(STATE, tmp_path / "c")


@pytest.mark.asyncio
async def test_a_hook_that_fails_after_undoes_nothing_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(where: str) -> None:
        raise ValueError("tracker")

    async with aiockpt.AsyncCheckpointer() as ckpt:
        with caplog.at_level(logging.ERROR, "aiockpt"):
            result = await ckpt.save(STATE, tmp_path / "c", post_commit=fails)
        assert isinstance(result.post_commit_error, aiockpt.SaveError)
        assert isinstance(result.post_commit_error.__cause__, ValueError)
        assert "is published all the same" in caplog.text
        assert torch.equal((await ckpt.load(tmp_path / "c"))["w"], STATE["w"])


@pytest.mark.asyncio
async def test_a_save_that_is_cancelled_while_its_hook_runs_leaves_nothing(tmp_path: Path) -> None:
    async with aiockpt.AsyncCheckpointer() as ckpt:
        handles: list[aiockpt.SaveHandle] = []
        handles.append(ckpt.save(STATE, tmp_path / "c", pre_commit=lambda _: handles[0].cancel() and None))
        with pytest.raises(aiockpt.SaveCancelledError):
            await handles[0]
        assert await handles[0].cancel()
        assert not list(tmp_path.iterdir())


@pytest.mark.asyncio
async def test_a_hook_that_wants_to_end_the_program_undoes_nothing(tmp_path: Path) -> None:
    def ends(where: str) -> None:
        raise SystemExit(3)

    async with aiockpt.AsyncCheckpointer() as ckpt:
        result = await ckpt.save(STATE, tmp_path / "c", post_commit=ends)
        assert isinstance(result.post_commit_error.__cause__, SystemExit)
        with pytest.raises(aiockpt.SaveError, match=r"pre_commit hook of .* failed: SystemExit"):
            await ckpt.save(STATE, tmp_path / "d", pre_commit=ends)
        assert [path.name for path in tmp_path.iterdir()] == ["c"]

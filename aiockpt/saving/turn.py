"""The order of saves: each milestone of a save waits until the save before it is past the same milestone."""

from __future__ import annotations

from typing import Literal, get_args

import anyio

Milestone = Literal["planned", "staged", "over", "reported"]


class Turn:
    """The turn of one save, for the engine's loop.

    ==============  ===================================================================================
    past               what the next save may do then
    ==============  ===================================================================================
    ``planned``     meet the other ranks to plan: all ranks plan in the same order
    ``staged``      copy its tensors
    ``over``        create files, run its pre_commit hook and commit: commits keep the order of the calls
    ``reported``    count its save_timeout: the callers know how this one has ended
    ==============  ===================================================================================
    """

    def __init__(self, before: Turn | None) -> None:
        self._before = before
        self._past: dict[Milestone, anyio.Event] = {milestone: anyio.Event() for milestone in get_args(Milestone)}

    async def wait_for(self, milestone: Milestone) -> None:
        """Wait until the save before is past a milestone."""
        if self._before is not None:
            await self._before._past[milestone].wait()

    @property
    def before_is_over(self) -> anyio.Event | None:
        """Set when the save before is over; None if there is none."""
        return None if self._before is None else self._before._past["over"]

    def pass_milestone(self, milestone: Milestone) -> None:
        """Allow the next save to enter a milestone."""
        self._past[milestone].set()

    def finish(self) -> None:
        """Allow the next save to enter every milestone, at once."""
        for event in self._past.values():
            event.set()
        self._before = None  # else the chain of turns would keep every save of the run alive

    async def finish_in_order(self) -> None:
        """Allow the next save to enter each milestone, once the saves before are past it. Not to be cancelled."""
        milestones: tuple[Milestone, ...] = ("planned", "staged", "over")
        for milestone in milestones:
            await self.wait_for(milestone)
            self.pass_milestone(milestone)
        self.finish()

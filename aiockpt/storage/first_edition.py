"""Adapters for storages that were written for the interface of aiockpt 0.1 and 0.2, which go on working.

===================================  =================================================================================
they have                            instead of
===================================  =================================================================================
``FileSink.write(view)``             ``write(view, free)``: the view was free when it returned
``Transaction.commit()``             ``commit(documents)``: the documents were files like any other
``SharedTransaction.identity``,      ``stamp``, and ``take_over(..., stamp=...)``; the owner's documents were removed by
``take_over(..., identity=...)``     ``delete_file``
===================================  =================================================================================

The classes are adapted when they are defined, by the signatures of their methods.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any


def adapt_sink(cls: Any) -> None:
    """Let ``write`` take a second argument."""
    write = cls.__dict__.get("write")
    if write is None or len(_parameters(write)) != 1:
        return

    @functools.wraps(write)
    async def write_and_free(self: Any, view: memoryview, free: Callable[[], object] = lambda: None) -> None:
        await write(self, view)
        free()

    cls.write = write_and_free


def adapt_transaction(cls: Any) -> None:
    """Let ``commit`` take documents, and name ``identity`` a stamp."""
    commit = cls.__dict__.get("commit")
    if commit is not None and not _parameters(commit):

        @functools.wraps(commit)
        async def write_and_commit(self: Any, documents: Mapping[str, Any] | None = None) -> None:
            if documents and hasattr(self, "delete_file"):  # the owner may have written them before it died
                for name in documents:
                    await self.delete_file(name)
            await self.write_files(documents or {})
            await commit(self)

        cls.commit = write_and_commit
    if "identity" in cls.__dict__ and "stamp" not in cls.__dict__:
        cls.stamp = property(lambda self: self.identity)


def adapt_storage(cls: Any) -> None:
    """Let ``take_over`` take a stamp."""
    take_over = cls.__dict__.get("take_over")
    if take_over is not None and "identity" in inspect.signature(take_over).parameters:

        @functools.wraps(take_over)
        async def take_over_by_stamp(self: Any, *args: Any, **options: Any) -> Any:
            if "stamp" in options:  # else it is called by a class that was derived from it
                options["identity"] = options.pop("stamp")
            return await take_over(self, *args, **options)

        cls.take_over = take_over_by_stamp


def _parameters(method: Callable[..., object]) -> list[inspect.Parameter]:
    """Return the parameters by position behind ``self``; for one that takes any number, more than any method has."""
    found = list(inspect.signature(method).parameters.values())[1:]
    if any(each.kind is each.VAR_POSITIONAL for each in found):
        return found * 3
    return [each for each in found if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]

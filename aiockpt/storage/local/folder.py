"""What others have put into the temporary directory of a checkpoint, beside the files of its transaction."""

from __future__ import annotations

import os
from collections.abc import Container
from typing import NoReturn

from isal.isal_zlib import crc32

from aiockpt.format.manifest.manifest import FileFacts
from aiockpt.format.names import OPEN_MARK
from aiockpt.storage.local.commit import sync_directory
from aiockpt.storage.local.entries import open_regular
from aiockpt.storage.local.retries import sync_fd

_STEP_BYTES = 1 << 20


def seal(directory: str, known: Container[str] | None, *, fsync: bool) -> dict[str, FileFacts]:
    """Make everything below a directory durable; return the facts of the files whose names are not known. Blocks.

    ``known``: None if no facts are of interest, and nothing is read.
    """
    facts: dict[str, FileFacts] = {}
    for folder, _, names in os.walk(directory, onerror=_fail):
        for name in names:
            path = os.path.join(folder, name)
            relative = os.path.relpath(path, directory)
            if relative != OPEN_MARK and (known is None or relative not in known):
                found = _seal_file(path, reads=known is not None, fsync=fsync)
                facts |= {} if known is None else {relative: found}
        if fsync:
            sync_directory(folder)
    return facts


def _seal_file(path: str, *, reads: bool, fsync: bool) -> FileFacts:
    with open(open_regular(path, flags=os.O_NOFOLLOW), "rb", buffering=0) as file:
        nbytes = crc = 0
        while reads and (piece := file.read(_STEP_BYTES)):
            nbytes, crc = nbytes + len(piece), crc32(piece, crc)
        if fsync:
            sync_fd(file.fileno())
    return FileFacts(nbytes, crc)


def _fail(error: OSError) -> NoReturn:
    raise error

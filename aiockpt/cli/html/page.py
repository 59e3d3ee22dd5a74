"""Writes a checkpoint's facts into one self-contained HTML page.

The page has a policy that forbids it everything but its own script and style, which are named by their hashes. Facts
are JSON in which every ``<`` is escaped, so that no key can end the element that holds it; the script puts them into
the page as text only.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

from aiockpt.cli.output import dtype_text
from aiockpt.reading.info import TensorInfo, value_text

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from aiockpt.cli.statistics import Survey
    from aiockpt.reading.info import ObjectInfo

_NONE = object()
_FOLDER = files("aiockpt") / "cli" / "html"


def html_page(
    path: str,
    kind: str,
    metadata: Mapping[str, Any],
    infos: Collection[TensorInfo | ObjectInfo],
    stats: Mapping[str, Survey] | None = None,
    values: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> str:
    """Return the page of a checkpoint. Without the ``sizes`` of files, in bytes, each ends with its last item."""
    stored = (part for info in infos for part in (info.chunks if isinstance(info, TensorInfo) else (info,)))
    columns = _Columns(sorted({part.file for part in stored if part.file}))
    for info in infos:
        columns.add(info, (stats or {}).get(info.key), (values or {}).get(info.key, _NONE))
    shown = json.dumps(dict(metadata), indent=2, ensure_ascii=False, default=repr) if metadata else ""
    facts = {"path": path, "format": kind, "metadata": shown, **columns.as_json(sizes or {})}
    data = json.dumps(facts, separators=(",", ":")).replace("<", "\\u003c")
    style, script = (_asset(name) for name in ("page.css", "page.js"))
    return Template(_asset("page.html")).substitute(
        style=style, style_hash=_hash(style), script=script, script_hash=_hash(script), data=data
    )


class _Columns:
    """The keys in columns: what many keys have in common is written once."""

    def __init__(self, files: Sequence[str]) -> None:
        self._last = ""
        self._file_bytes = dict.fromkeys(files, 0)  # at least: to the end of the last item
        self._files = {name: number for number, name in enumerate(files)}
        self.keys: list[int | str] = []  # for each key: letters in common with the one before, and the others
        self.dtypes: dict[str, int] = {}
        self.shapes: dict[tuple[int, ...], int] = {}
        self.forms: dict[tuple[int, int, int], int] = {}  # dtype or -1 for an object, shape, bytes
        self.form: list[int] = []
        # of the item of each key; -1 as its file: it is not in one piece
        self.file: list[int] = []
        self.offset: list[int] = []
        self.length: list[int] = []
        self.pieces: list[tuple[int, Sequence[Sequence[Any]]]] = []
        self.stats: list[tuple[int, list[Any]]] = []
        self.notes: list[tuple[int, str]] = []

    def add(self, info: TensorInfo | ObjectInfo, stats: Survey | None, value: object) -> None:
        row = len(self.form)
        pairs = enumerate(zip(self._last, info.key, strict=False))
        common = next((at for at, (a, b) in pairs if a != b), min(len(self._last), len(info.key)))
        # The page counts in UTF-16: a prefix must not end within a pair of surrogates, nor count one letter as two.
        same = len(info.key[:common].encode("utf-16-le", "surrogatepass")) // 2
        self.keys += [same, info.key[common:]]
        self._last = info.key
        if isinstance(info, TensorInfo):
            dtype = _number(self.dtypes, dtype_text(info))
            form = (dtype, _number(self.shapes, info.shape), 0 if info.tied_to else info.nbytes)
            pieces: list[tuple[int, int, int, Sequence[int], Sequence[int]]] = [
                (self._place(c.file, c.offset + c.nbytes), c.offset, c.nbytes, c.offsets, c.sizes) for c in info.chunks
            ]
        else:
            form = (-1, 0, info.nbytes)
            last = info.offset + info.nbytes
            pieces = [(self._place(info.file, last), info.offset, info.nbytes, (), ())] if info.file else []
        self.form.append(_number(self.forms, form))
        file, offset, length = pieces[0][:3] if len(pieces) == 1 else (-1, 0, 0)
        self.file.append(file)
        self.offset.append(offset)
        self.length.append(length)
        if len(pieces) > 1:
            self.pieces.append((row, pieces))
        if isinstance(info, TensorInfo) and info.tied_to:
            self.notes.append((row, f"tied to {info.tied_to}"))
        elif value is not _NONE:
            self.notes.append((row, value_text(value)))
        if stats is not None:
            self.stats.append((row, stats.as_json()))

    def _place(self, file: str, stop: int) -> int:
        self._file_bytes[file] = max(self._file_bytes[file], stop)
        return self._files[file]

    def as_json(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        columns = {name: list(values) for name, values in vars(self).items() if not name.startswith("_")}
        files = [(name, max(sizes.get(name, 0), least)) for name, least in self._file_bytes.items()]
        return {**columns, "files": files}


def _number(known: dict[Any, int], value: Any) -> int:
    return known.setdefault(value, len(known))


def _asset(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

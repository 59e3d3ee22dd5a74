"""What a checkpoint holds at and below a name, put together again."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from typing import TYPE_CHECKING, Any

from aiockpt.format.keys import containers_within
from aiockpt.planning.flatten import unflatten

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from aiockpt.format.index import ObjPath


class Subtrees:
    """The leaves and containers of a checkpoint, found by the name of a container around them.

    Names are joined by dots, whatever the path: a safetensors file has the key ``model.w`` where a state dict has
    ``{"model": {"w": ...}}``, and both are below ``model``.

    Args:
        paths: for each leaf, in the order of the state dict, where it belongs.
        containers: records of the containers that paths can't express; see `aiockpt.planning.flatten`.
    """

    def __init__(self, paths: Mapping[str, ObjPath], containers: Sequence[Mapping[str, Any]]) -> None:
        self._paths = paths
        self._containers = containers

    @cached_property
    def _order(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self._paths)}

    @cached_property
    def _names(self) -> list[str]:
        return sorted(self._paths)

    @cached_property
    def _records(self) -> list[tuple[str, int]]:
        return sorted((_joined(record["path"]), number) for number, record in enumerate(self._containers))

    @cached_property
    def _record_names(self) -> list[str]:
        return [name for name, _ in self._records]

    def __contains__(self, name: object) -> bool:
        """Return whether there is a leaf below a name."""
        return isinstance(name, str) and bool(_spans(self._names, name)[1])

    def holds(self, name: str) -> bool:
        """Return whether there is a leaf or a container at or below a name."""
        return not name or any(map(len, _spans(self._names, name) + _spans(self._record_names, name)))

    def below(self, name: str) -> list[str]:
        """Return the names of the leaves at or below a name, in their order; all of them for the empty name."""
        if not name:
            return list(self._paths)
        return sorted((self._names[at] for span in _spans(self._names, name) for at in span), key=self._order.get)  # type: ignore[arg-type]

    def build(self, name: str, values: Mapping[str, Any]) -> Any:
        """Put together what is stored below a name.

        Args:
            name: that of a container, or of a leaf.
            values: leaves at or below it, by their names.

        Returns:
            The container, of the type that was recorded, or the leaf; an empty dict if there is nothing.

        Raises:
            StructureError: the paths contradict each other.
        """
        names = self.below(name)
        # Under one more key, for what is built may be a list, or a leaf.
        paths: list[ObjPath] = [("", *_beyond(self._paths[each], name)) for each in names]
        orders = [self._order[each] for each in names]
        records = [self._containers[number] for number in self._records_below(name)]
        containers: Any = [
            {**record, "path": ["", *_beyond(record["path"], name)], "at": bisect_left(orders, record["at"])}
            for record in records
        ]
        kept = [number for number, each in enumerate(names) if each in values]
        if len(kept) < len(names):
            containers = containers_within(containers, names, paths, values.keys())
        return unflatten([paths[n] for n in kept], [values[names[n]] for n in kept], containers).get("", {})

    def _records_below(self, name: str) -> list[int]:
        spans = _spans(self._record_names, name) if name else (range(len(self._records)),)
        return sorted(self._records[at][1] for span in spans for at in span)


def _spans(names: Sequence[str], name: str) -> tuple[range, range]:
    """Return where in sorted names those are that equal a name, and those below it."""
    at = bisect_left(names, name)
    # No character lies between the dot and the slash.
    return range(at, bisect_left(names, name + "\0", at)), range(
        bisect_left(names, name + ".", at), bisect_left(names, name + "/", at)
    )


def _joined(path: Iterable[str | int]) -> str:
    return ".".join(map(str, path))


def _beyond(path: Sequence[str | int], name: str) -> ObjPath:
    """Return what of a path lies below the container of a name."""
    if not name:
        return tuple(path)
    length = -1
    for depth, part in enumerate(path):
        if length == len(name):
            return tuple(path[depth:])
        length += 1 + len(str(part))
    rest = _joined(path)[len(name) + 1 :]
    return (rest,) if rest else ()

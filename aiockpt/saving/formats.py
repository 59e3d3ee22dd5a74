"""The choice of a file format for a save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiockpt.format.names import SUFFIX
from aiockpt.planning.dcp_plan import DcpFormat
from aiockpt.planning.safetensors_plan import SafetensorsFormat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiockpt.format.manifest.manifest import JsonValue
    from aiockpt.options import SaveFormat


def format_for(name: SaveFormat | None, path: str) -> SaveFormat:
    """Return the format to save in: the one that was asked for, or else the one that the path's ending means.

    Raises:
        ValueError: they contradict each other.
    """
    if name == "dcp" and path.endswith(SUFFIX):
        raise ValueError(f"{path} ends in {SUFFIX}, which contradicts format='dcp'; rename it, or leave out format")
    return name or ("safetensors" if path.endswith(SUFFIX) else "dcp")


def choose_form(
    name: SaveFormat | None,
    path: str,
    metadata: Mapping[str, JsonValue],
    *,
    shard_bytes: int | None,
    fqn_to_index_mapping: Mapping[str, int] | None,
    separation_hint: str | Sequence[str] | None,
    files: int,
) -> SafetensorsFormat | DcpFormat | None:
    """Return the options of a plan that is not in DCP's default form; None for that form.

    Raises:
        ValueError: a format that is not known, or an option where it means nothing.
        SaveError: the metadata can't be stored in this format.
    """
    hints = (separation_hint,) if isinstance(separation_hint, str) else tuple(separation_hint or ())
    for hint in hints:
        if name != "dcp":
            raise ValueError("separation_hint is for format='dcp'")
        if not isinstance(hint, str) or not hint or "/" in hint or "\0" in hint or hint.startswith("."):
            raise ValueError(
                f"separation_hint has {hint!r}; it must be the beginning of names, and of file names: no '/', no '.' "
                "at its beginning"
            )
    if name == "safetensors":
        return SafetensorsFormat(
            metadata, single_file=path.endswith(SUFFIX), shard_bytes=shard_bytes, file_of=fqn_to_index_mapping
        )
    if name != "dcp":
        raise ValueError(f"format is {name!r}; it must be 'dcp' or 'safetensors'")
    if shard_bytes is not None:
        raise ValueError("shard_bytes is for format='safetensors'; the dcp format has io_threads files")
    if fqn_to_index_mapping is not None:
        raise ValueError("fqn_to_index_mapping is for format='safetensors'")
    return DcpFormat(files, hints) if hints else None

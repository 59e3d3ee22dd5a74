"""Reading the manifest, `.aiockpt.json`, believing nothing."""

from __future__ import annotations

import json

from isal.isal_zlib import crc32

from aiockpt.errors import CorruptCheckpointError
from aiockpt.format.checks import check_paths
from aiockpt.format.item.arrays import check_arrays
from aiockpt.format.manifest.manifest import FORMAT_VERSION, SEAL, Manifest, read_user_metadata
from aiockpt.format.manifest.manifest_index import decode_index
from aiockpt.format.manifest.manifest_parts import containers, file_facts, mapping, text
from aiockpt.format.names import MANIFEST_NAME
from aiockpt.format.transforms.item_transforms import decode_transformed


def decode_manifest(data: bytes) -> Manifest:
    """Read a manifest.

    Raises:
        CorruptCheckpointError: it is damaged, was edited, or is of a later format than this program knows.
    """
    try:
        body, _, seal = data.rpartition(SEAL.encode())
        document = json.loads(data.decode())
        if int(seal[:8], 16) != crc32(body):
            raise ValueError("its text does not match its CRC")
        if document["format_version"] > FORMAT_VERSION:
            raise ValueError(f"format version {document['format_version']} needs a later version of aiockpt")
        document["containers"] = containers(document["containers"])
        document["metadata"] = read_user_metadata(mapping(document["metadata"]))
        index = decode_index(document) if "index" in document else None
        check_paths({} if index is None else index.paths, document["containers"])
        if index is not None:
            check_arrays(index.entries, index.paths, document["containers"])
        return Manifest(
            writer=text(document["writer"]),
            created=text(document["created"]),
            metadata=mapping(document["metadata"]),
            files=file_facts(document["files"]),
            totals=mapping(document["totals"]),
            times_s=mapping(document["times_s"]),
            containers=document["containers"],
            index=index,
            transformed=decode_transformed(document["transformed"]) if "transformed" in document else {},
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as exc:
        raise CorruptCheckpointError(
            f"{MANIFEST_NAME} is damaged or was edited ({exc}); restore it, or remove it to read the "
            "checkpoint as a plain DCP one"
        ) from exc

"""Paths of every kind, with what each is: the table by which all commands are compared."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import aiockpt
from tests.stock import ALONE


@dataclass(frozen=True)
class Kind:
    """A kind of path.

    Attributes:
        make: makes it at a path that does not exist, and returns the path to use.
        keys: the keys that it holds; None if it is not whole.
        is_damaged: it is a checkpoint, but not a whole one.
        says: part of the error's message, if it can't be loaded.
        holds: the names of the checkpoints in it, if it is a directory of several.
    """

    make: Callable[[Path], Path | None]
    keys: tuple[str, ...] | None = None
    is_damaged: bool = False
    says: str = "."
    holds: tuple[str, ...] = ()


def tensor(value: float = 1.0) -> torch.Tensor:
    return torch.arange(6, dtype=torch.float32) * value


def save_ours(path: Path, **options: object) -> None:
    with aiockpt.SyncCheckpointer(process_group=None) as ckpt:
        ckpt.save({"w": tensor(), "b": tensor(2)}, path, **options)  # type: ignore[arg-type]


def save_stock(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": tensor(), "b": tensor(2)}, checkpoint_id=path, **ALONE)


def files(folder: Path, *names: str) -> Path:
    """Write a file of each name: torch.save and safetensors files by their endings, others with text."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".safetensors"):
            save_file({f"t{number}": tensor(number)}, path)
        elif name.endswith((".pt", ".pth", ".bin", ".ckpt")):
            torch.save({f"t{number}": tensor(number)}, path)
        else:
            path.write_text("{}")
    return folder


def indexed(folder: Path, suffix: str, index: str) -> Path:
    names = [f"model-0000{n}-of-00002{suffix}" for n in (1, 2)]
    files(folder, *names)
    (folder / index).write_text(json.dumps({"weight_map": {"t0": names[0], "t1": names[1]}}))
    return folder


def run(folder: Path, *others: str) -> Path:
    for step in (1, 2):
        save_ours(folder / f"step-0000000{step}")
    return files(folder, *others)


def without(made: Path, name: str) -> Path:
    (made / name).unlink()
    return made


def cut(path: Path, nbytes: int = 1) -> None:
    os.truncate(path, path.stat().st_size - nbytes)


def _with(make: Callable[[Path], object], change: Callable[[Path], object]) -> Callable[[Path], None]:
    def made(path: Path) -> None:
        make(path)
        change(path)

    return made


def _text(data: bytes, name: str) -> Callable[[Path], Path]:
    def made(path: Path) -> Path:
        path.mkdir()
        (path / name).write_bytes(data)
        return path / name

    return made


def _zip(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "x")
    return path


def _script(path: Path) -> Path:
    """Write an archive with the records of ``torch.jit.save``, of which the sources are compressed."""
    path.mkdir()
    with zipfile.ZipFile(path / "model.pt", "w") as archive:
        for name in ("m/data/0", "m/data.pkl", "m/constants.pkl", "m/version"):
            archive.writestr(name, "x")
        archive.writestr("m/code/__torch__.py", "x" * 100, compress_type=zipfile.ZIP_DEFLATED)
    return path / "model.pt"


def _npz(path: Path) -> Path:
    path.mkdir()
    numpy.savez(path / "a.npz", w=numpy.ones(3))
    return path / "a.npz"


def _fifo(path: Path) -> Path:
    path.mkdir()
    os.mkfifo(path / "model.safetensors")
    return path


BOTH = ("b", "w")
ONE = ("t0",)
TWO = ("t0", "t1")
MANIFEST, METADATA, DATA = ".aiockpt.json", ".metadata", "__0_0.distcp"

_OFFSETS = json.dumps({"t": {"saved_offsets": [4]}})

KINDS: dict[str, Kind] = {
    "ours": Kind(save_ours, BOTH),
    "ours in safetensors": Kind(lambda path: save_ours(path, format="safetensors"), BOTH),
    "ours in safetensors files": Kind(lambda path: save_ours(path, format="safetensors", shard_bytes=30), BOTH),
    "stock": Kind(save_stock, BOTH),
    "stock beside other files": Kind(_with(save_stock, lambda path: files(path, "notes.txt", "a.pt")), BOTH),
    "a rank alone": Kind(_with(save_stock, lambda path: (path / METADATA).rename(path / "__0.metadata")), BOTH),
    "one safetensors": Kind(lambda path: files(path, "model.safetensors", "config.json"), ONE),
    "one torch": Kind(lambda path: files(path, "last.pt", "log.txt"), ONE),
    "a torch file": Kind(lambda path: files(path, "last.pt") / "last.pt", ONE),
    "a safetensors file": Kind(lambda path: files(path, "w.safetensors") / "w.safetensors", ONE),
    "index of safetensors": Kind(lambda path: indexed(path, ".safetensors", "model.safetensors.index.json"), TWO),
    "index of torch": Kind(lambda path: indexed(path, ".bin", "pytorch_model.bin.index.json"), TWO),
    "index beside another model": Kind(
        lambda path: files(indexed(path, ".safetensors", "model.safetensors.index.json"), "consolidated.safetensors"),
        TWO,
    ),
    "index with plain paths": Kind(
        _with(
            lambda p: indexed(p, ".safetensors", "model.safetensors.index.json"),
            lambda p: (p / "model.safetensors.index.json").write_text(
                (p / "model.safetensors.index.json").read_text().replace("model-", "././model-")
            ),
        ),
        TWO,
    ),
    "parts": Kind(lambda path: files(path, "m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"), TWO),
    "model beside its optimizer": Kind(
        lambda path: files(path, "model.safetensors", "optimizer.pt", "rng_state.pth", "training_args.bin"), ONE
    ),
    "model in torch's format beside its optimizer": Kind(
        lambda path: files(path, "pytorch_model.bin", "optimizer.bin", "scheduler.bin", "config.json"), ONE
    ),
    "model in two formats": Kind(lambda path: files(path, "model.safetensors", "pytorch_model.bin"), ONE),
    "model beside copies of macOS": Kind(
        lambda p: files(p, "model.safetensors", "._model.safetensors", "._a.safetensors.index.json", ".DS_Store"), ONE
    ),
    "model beside other bytes": Kind(
        _with(
            lambda p: files(p, "model.pt", "openvino/m.xml"),
            lambda p: [(p / n).write_bytes(b"weights of another program") for n in ("train.bin", "openvino/m.bin")],
        ),
        ONE,
    ),
    "model beside a download that was cut": Kind(
        _with(
            lambda p: files(p, "model.safetensors"),
            lambda p: (p / "model.safetensors.tmp").write_bytes((p / "model.safetensors").read_bytes()[:50]),
        ),
        ONE,
    ),
    "one in capitals": Kind(_with(files, lambda p: save_file({"t0": tensor()}, p / "MODEL.SAFETENSORS")), ONE),
    "a torch file in capitals": Kind(_with(files, lambda p: torch.save({"t0": tensor()}, p / "Model.PT")), ONE),
    "best model of ImageNet": Kind(_with(files, lambda p: torch.save({"t0": tensor()}, p / "model_best.pth.tar")), ONE),
    "a torch file without tensors": Kind(
        _with(lambda p: files(p, "README.md", "trainer_state.json"), lambda p: torch.save({"t0": 3}, p / "a.pt")), ONE
    ),
    "parts of torch": Kind(lambda p: files(p, "model_00001-of-00002.pt", "model_00002-of-00002.pt"), TWO),
    # --- damaged
    **{
        f"part {name}": Kind(lambda p, name=name: files(p, name), is_damaged=True, says=r"lacks|may be one of several")
        for name in (
            *("model-00001-of-00002.pt", "model_00001-of-00002.safetensors", "m-00001-of-00002 (1).safetensors"),
            *("w.1of2.bin", "rank1.pt", "model-shard1.pt", "consolidated.01.pth", "model_world_size_2_rank_0.pt"),
        )
    },
    "a rank's shards by their name": Kind(
        lambda p: files(p, "shard-00001-m-00001-of-00001.safetensors") / "shard-00001-m-00001-of-00001.safetensors",
        is_damaged=True,
        says="shards of one rank alone",
    ),
    "a rank's shards by their offsets": Kind(
        _with(
            files,
            lambda p: save_file({"t": tensor()}, p / "m.safetensors", {"DCP_SHARDING_INFO": _OFFSETS}),
        ),
        is_damaged=True,
        says="shards of one rank alone|chunks of t are not all",
    ),
    "parts of different saves": Kind(
        _with(files, lambda p: [save_file({"t": tensor()}, p / f"m-{n}-of-2.safetensors") for n in (1, 2)]),
        is_damaged=True,
        says="t is in both m-1-of-2.safetensors and m-2-of-2.safetensors",
    ),
    "index of another save": Kind(
        _with(
            lambda p: indexed(p, ".safetensors", "m.safetensors.index.json"),
            lambda p: save_file({"t9": tensor()}, p / "model-00002-of-00002.safetensors"),
        ),
        is_damaged=True,
        says="does not hold",
    ),
    "a download that goes on": Kind(
        lambda p: files(p, "model.safetensors", "model.safetensors.aria2"), is_damaged=True, says="aria2"
    ),
    "manifest damaged": Kind(_with(save_ours, lambda p: (p / MANIFEST).write_text("{}")), is_damaged=True),
    "metadata missing": Kind(_with(save_ours, lambda p: (p / METADATA).unlink()), is_damaged=True),
    "data missing": Kind(_with(save_ours, lambda p: (p / DATA).unlink()), is_damaged=True),
    "data cut": Kind(_with(save_ours, lambda p: cut(p / DATA)), is_damaged=True),
    "all but the manifest missing": Kind(
        _with(save_ours, lambda p: [(p / n).unlink() for n in (METADATA, DATA)]), is_damaged=True
    ),
    "stock, data missing": Kind(_with(save_stock, lambda p: (p / DATA).unlink()), is_damaged=True),
    "a rank alone, data missing": Kind(
        _with(save_stock, lambda p: [(p / METADATA).rename(p / "__0.metadata"), (p / DATA).unlink()]), is_damaged=True
    ),
    "stock, metadata cut": Kind(_with(save_stock, lambda p: cut(p / METADATA)), is_damaged=True),
    "stock, unfinished": Kind(_with(save_stock, lambda p: (p / METADATA).unlink()), is_damaged=True),
    "index damaged": Kind(
        _with(lambda p: files(p, "m.safetensors"), lambda p: (p / "m.safetensors.index.json").write_text("[]")),
        is_damaged=True,
    ),
    "file of an index missing": Kind(
        lambda p: without(indexed(p, ".safetensors", "a.safetensors.index.json"), "model-00002-of-00002.safetensors"),
        is_damaged=True,
        says="model-00002-of-00002.safetensors",
    ),
    "file of a torch index missing": Kind(
        lambda p: without(indexed(p, ".bin", "pytorch_model.bin.index.json"), "model-00001-of-00002.bin"),
        is_damaged=True,
        says="model-00001-of-00002.bin",
    ),
    "a part missing": Kind(
        lambda p: files(p, "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"),
        is_damaged=True,
        says="model-00002-of-00003.safetensors",
    ),
    "a safetensors cut": Kind(
        _with(lambda p: files(p, "m.safetensors"), lambda p: cut(p / "m.safetensors")), is_damaged=True
    ),
    "a safetensors of zeros": Kind(_text(bytes(400), "m.safetensors"), is_damaged=True),
    "a torch file cut": Kind(_with(lambda p: files(p, "m.pt"), lambda p: cut(p / "m.pt", 200)), is_damaged=True),
    # --- directories of several
    "run": Kind(run, holds=("step-00000001", "step-00000002")),
    "run beside a safetensors": Kind(
        lambda p: run(p, "export.safetensors"), holds=("export.safetensors", "step-00000001", "step-00000002")
    ),
    "model beside checkpoints": Kind(
        lambda p: run(p, "model.safetensors", "config.json"),
        holds=("model.safetensors", "step-00000001", "step-00000002"),
    ),
    "numbered runs": Kind(lambda p: [save_ours(p / str(n)) for n in range(3)] and None, holds=("0", "1", "2")),
    "two safetensors": Kind(
        lambda p: files(p, "a.safetensors", "b.safetensors"), holds=("a.safetensors", "b.safetensors")
    ),
    "two torch files": Kind(lambda p: files(p, "a.pt", "b.pt"), holds=("a.pt", "b.pt")),
    "one of each": Kind(lambda p: files(p, "a.pt", "b.safetensors"), holds=("a.pt", "b.safetensors")),
    "lone file below": Kind(lambda p: files(p, "model/model.safetensors"), holds=("model",)),
    "lone step below": Kind(lambda p: save_ours(p / "step-1"), holds=("step-1",)),
    # --- others
    "nothing": Kind(lambda p: p.mkdir(), says="no checkpoint"),
    "notes": Kind(lambda p: files(p, "notes.txt"), says="no checkpoint"),
    "pointer": Kind(_text(b"version https://git-lfs.github.com/spec/v1\noid", "m.safetensors"), says="Git LFS pointer"),
    "pointer in a directory": Kind(
        _with(
            files, lambda p: (p / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid")
        ),
        says="Git LFS pointer",
    ),
    "pointer in a set": Kind(
        _with(
            lambda p: indexed(p, ".safetensors", "model.safetensors.index.json"),
            lambda p: (p / "model-00002-of-00002.safetensors").write_bytes(
                b"version https://git-lfs.github.com/spec/v1"
            ),
        ),
        is_damaged=True,
        says="Git LFS pointer",
    ),
    "an optimizer so far": Kind(
        lambda p: files(p, "optimizer.pt", "scheduler.pt", "trainer_state.json"), says="but no model"
    ),
    "pointer to a torch file": Kind(
        _with(files, lambda p: (p / "pytorch_model.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1")),
        says="Git LFS pointer",
    ),
    "nemo": Kind(_text(b"./model_config.yaml".ljust(257, b"\0") + b"ustar", "m.nemo"), says="NeMo"),
    "gguf": Kind(_text(b"GGUF" + bytes(40), "m.gguf"), says="GGUF"),
    "hdf5": Kind(_text(b"\x89HDF\r\n\x1a\n" + bytes(40), "m.h5"), says="HDF5"),
    "onnx": Kind(_text(b"\x08\x07\x12\x07pytorch", "m.onnx"), says="ONNX"),
    "npz": Kind(_npz, says="npz"),
    "npy": Kind(_text(b"\x93NUMPY\x01\0v\0" + bytes(40), "m.npy"), says="NumPy"),
    "pickle": Kind(_text(pickle.dumps({"w": 1}), "m.pkl"), says="pickle"),
    "script": Kind(_script, says="TorchScript"),
    "zip": Kind(lambda p: _zip(files(p) / "a.zip", "x/y.txt"), says="zip archive"),
    "gzip": Kind(_text(gzip.compress(b"mine"), "m.gz"), says="no checkpoint"),
    "fifo": Kind(_fifo, says="no checkpoint"),
    "deepspeed": Kind(
        lambda p: files(
            p, "global_step5/mp_rank_00_model_states.pt", "global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt"
        ),
        says="zero_to_fp32",
    ),
    **{
        f"deepspeed, {what}": Kind(lambda p, names=names: files(p, *names), says="zero_to_fp32")
        for what, names in {
            "two layouts": ("mp_rank_00_model_states.pt", "global_step5/mp_rank_00_model_states.pt"),
            "layers": ("mp_rank_00_model_states.pt", "layer_00-model_00-model_states.pt"),
            "layers below": ("global_step5/mp_rank_00_model_states.pt", "global_step5/layer_00-model_states.pt"),
            "universal": ("mp_rank_00_model_states.pt", "zero/a.weight/fp32.pt", "zero/a.weight/exp_avg.pt"),
            "universal below": ("step5/mp_rank_00_model_states.pt", "step5/zero/a/fp32.pt", "step5/zero/a/step.pt"),
        }.items()
    },
    "deepspeed step": Kind(
        lambda p: files(p, "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        says="zero_to_fp32",
    ),
}


def made(name: str, path: Path) -> Path:
    """Make a path of this kind below a new directory; return it."""
    path.parent.mkdir(parents=True)
    return KINDS[name].make(path) or path


_SEAL = ',\n  "manifest_crc32": "'


def body_of(manifest: bytes) -> bytes:
    """Return a manifest without its CRC."""
    return manifest.rpartition(_SEAL.encode())[0]


def sealed(body: bytes) -> bytes:
    """Return a manifest with its CRC."""
    return body + f'{_SEAL}{zlib.crc32(body):08x}"\n}}\n'.encode()

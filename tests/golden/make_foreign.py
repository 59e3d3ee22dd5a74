"""Write the golden checkpoints of other tools: ``python -m tests.golden.make_foreign TOOL FOLDER``.

Those in ``foreign`` were written on Linux with torch 2.13.0, safetensors 0.8.0 and these tools:

==============  ==========================================  ==================================================
TOOL            written by                                  folders
==============  ==========================================  ==================================================
torch           ``HuggingFaceStorageWriter``                hf-sharded, hf-consolidated (as torchtitan has it)
transformers    transformers 5.23.0 and accelerate 1.15.0   hf-safetensors, hf-parts, hf-trainer, accelerate
bins            transformers 4.57.6, the last with .bin     hf-bin
megatron        megatron-core 0.16.1                        megatron
deepspeed       torch.save, as DeepSpeed 0.19.8 calls it    deepspeed
==============  ==========================================  ==================================================

aiockpt is not needed: any environment with the tool and with this directory's parents on ``PYTHONPATH`` will do.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.golden.states import values

LAYOUTS: dict[str, tuple[Any, ...]] = {  # on a mesh of two dimensions
    "rows": (Shard(0), Shard(0)),
    "columns": (Shard(1), Shard(1)),
    "grid": (Shard(0), Shard(1)),
    "hybrid": (Replicate(), Shard(0)),
    "same": (Replicate(), Replicate()),
    "uneven": (Shard(0), Shard(0)),
    "few": (Shard(0), Shard(0)),  # fewer rows than ranks
}
SHAPES = {
    "rows": (10, 4),
    "columns": (4, 6),
    "grid": (6, 8),
    "hybrid": (4, 3),
    "same": (5,),
    "uneven": (7, 2),
    "few": (1, 3),
}
PARTS = {"rows": 1, "columns": 1, "grid": 2, "hybrid": 2, "same": 1, "uneven": 2, "few": 1, "alone": 2}


def sharded() -> dict[str, torch.Tensor]:
    """Return the whole state of the folders hf-sharded and hf-consolidated."""
    state = {name: values(torch.float32, *shape, seed=seed) for seed, (name, shape) in enumerate(SHAPES.items())}
    return {**state, "grid": state["grid"].bfloat16(), "alone": values(torch.float32, 3, 3, seed=9)}


def named(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the value of a parameter of this name."""
    return values(torch.float32, *shape, seed=zlib.crc32(name.encode()) % 100)


def in_ranks(count: int, function: Callable[..., None], *args: Any) -> None:
    """Call a function on each of several ranks, which are processes with a gloo group."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (count, f"file://{folder}/store", function, args), count)


def _rank(rank: int, count: int, store: str, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    dist.init_process_group("gloo", store, rank=rank, world_size=count)
    function(rank, *args)
    dist.destroy_process_group()


# --- torch ----------------------------------------------------------------------------------------------


def write_torch(folder: Path) -> None:
    in_ranks(2, _save_sharded, folder / "hf-sharded", (2, 1), None)
    in_ranks(4, _save_sharded, folder / "hf-consolidated", (2, 2), PARTS)


def _save_sharded(rank: int, path: Path, shape: tuple[int, int], parts: dict[str, int] | None) -> None:
    mesh, whole = init_device_mesh("cpu", shape), sharded()
    state: dict[str, Any] = {key: distribute_tensor(whole[key], mesh, list(how)) for key, how in LAYOUTS.items()}
    if rank == 1:
        state["alone"] = whole["alone"]
    writer = dcp.HuggingFaceStorageWriter(
        str(path), fqn_to_index_mapping=parts, save_distributed=True, enable_consolidation=parts is not None
    )
    dcp.save(state, storage_writer=writer)


# --- Hugging Face ---------------------------------------------------------------------------------------


def _model(*, tied: bool) -> Any:
    transformers: Any = importlib.import_module("transformers")
    size = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **heads, tie_word_embeddings=tied))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(named(name, tuple(parameter.shape)))
    return model


def write_transformers(folder: Path) -> None:
    _model(tied=False).save_pretrained(folder / "hf-safetensors", max_shard_size="1KB")
    _model(tied=True).save_pretrained(folder / "hf-parts", max_shard_size="1KB")
    for file in (folder / "hf-parts").glob("*.json"):  # as they are after a download of the safetensors alone
        file.unlink()
    _train(folder / "hf-trainer")
    _accelerate(folder / "accelerate")


def _train(folder: Path) -> None:
    transformers: Any = importlib.import_module("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=1, save_steps=1, learning_rate=0.0, report_to="none", use_cpu=True
    )
    rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 8
    transformers.Trainer(_model(tied=True), arguments, train_dataset=rows).train()


def _accelerate(folder: Path) -> None:
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    model = _model(tied=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
    model, optimizer, _ = accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
    model.model.norm.weight.sum().backward()  # so that the optimizer has a state
    optimizer.step()
    accelerator.save_state(str(folder))


def write_bins(folder: Path) -> None:
    _model(tied=False).save_pretrained(folder / "hf-bin", max_shard_size="1KB", safe_serialization=False)


# --- Megatron and DeepSpeed -------------------------------------------------------------------------------


def write_megatron(folder: Path) -> None:
    (folder / "megatron").mkdir()
    in_ranks(2, _save_megatron, folder / "megatron")


def _save_megatron(rank: int, path: Path) -> None:
    checkpointing: Any = importlib.import_module("megatron.core.dist_checkpointing")
    backend = importlib.import_module("megatron.core.transformer.enums").AttnBackend.auto
    tensor, thing = checkpointing.ShardedTensor.from_rank_offsets, checkpointing.mapping.ShardedObject
    rows, names = values(torch.float32, 6, 4, seed=1), {0: "a", 1: "b"}
    state = {
        "model": {
            "decoder.weight": tensor("decoder.weight", rows[3 * rank : 3 * rank + 3].clone(), (0, rank, 2)),
            "decoder.bias": tensor("decoder.bias", values(torch.float32, 5, seed=2), replica_id=rank),
        },
        "rng_state": thing("rng_state", {"seed": names[rank]}, (2,), (rank,)),
        "optimizer": {"optimizer": {"param_groups": [{"lr": 0.125, "params": [0, 1]}]}, "scale": torch.tensor([2.0])},
        "args": argparse.Namespace(num_layers=2, attention_backend=backend),
        "iteration": 1234,
        "checkpoint_version": 3.0,
    }
    torch.cuda.synchronize = torch.cuda.current_device = lambda *_: None  # type: ignore[assignment]  # it has no CPU mode
    checkpointing.save(state, str(path), content_metadata={"distrib_optim_sharding_type": "dp_reshardable"})


def write_deepspeed(folder: Path) -> None:
    """Write the files of ZeRO stage 2 on two ranks, with the names and keys of ``deepspeed/runtime/engine.py``."""
    step = folder / "deepspeed" / "global_step5"
    step.mkdir(parents=True)
    flat = values(torch.float32, 24)
    shapes = [{"weight": torch.Size((4, 6))}]
    module = {"module": {"weight": flat.half().reshape(4, 6)}, "param_shapes": shapes, "global_steps": 5}
    torch.save({**module, "buffer_names": [], "ds_version": "0.19.8"}, step / "mp_rank_00_model_states.pt")
    for rank in range(2):
        mine = {"zero_stage": 2, "partition_count": 2, "single_partition_of_fp32_groups": [flat[12 * rank :][:12]]}
        whole = {"optimizer_state_dict": mine, "ds_version": "0.19.8"}
        torch.save(whole, step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (folder / "deepspeed" / "latest").write_text("global_step5")
    (folder / "deepspeed" / "zero_to_fp32.py").write_text("#!/usr/bin/env python\n")


TOOLS: dict[str, Callable[[Path], None]] = {
    "torch": write_torch,
    "transformers": write_transformers,
    "bins": write_bins,
    "megatron": write_megatron,
    "deepspeed": write_deepspeed,
}


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    target = Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    TOOLS[sys.argv[1]](target)

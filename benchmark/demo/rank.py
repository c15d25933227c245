"""A trainer rank: `torchrun -m benchmark.demo.rank SETTINGS`, with the JSON of `Settings`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch.distributed.device_mesh import init_device_mesh

from benchmark.demo import tiny_model
from benchmark.demo.events import TRAINER_START, EventWriter, Finished
from benchmark.demo.sequence import Sequence
from benchmark.demo.settings import Settings
from benchmark.demo.trainer import Trainer


def main(settings: Settings) -> None:
    backend = "gloo" if settings.device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    events = EventWriter(Path(settings.events) if rank == 0 else None)
    events.write(Finished(TRAINER_START, None))
    folder = Path(settings.folder)
    if settings.device == "cuda":
        torch.cuda.set_device(rank)
    cpu_mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    mesh = init_device_mesh(settings.device, (ranks,), mesh_dim_names=("tp",))
    with events.phase(f"make the model and its tokenizer, shard it over {ranks} trainer ranks"):
        if rank == 0:
            tiny_model.save(folder / "model", ranks, settings.target_tp)
        dist.barrier()  # the others read what the first has written
        tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
        trainer = Trainer(tiny_model.config(ranks, settings.target_tp), mesh)
    sequence = Sequence(trainer, tokenizer, cpu_mesh, events, settings)
    for dtype in settings.dtypes:
        sequence.run(dtype)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Settings))

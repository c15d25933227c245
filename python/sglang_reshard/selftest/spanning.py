"""A self-test that spans hosts: trainer ranks on all hosts but the last one, an engine on that.

    torchrun --nnodes 2 --nproc-per-node 8 --master-addr HOST --node-rank N -m sglang_reshard.selftest

Under srun, with MASTER_ADDR and MASTER_PORT set, it works in the same way.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import os
import secrets
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console

from sglang_reshard.api.remote_engine import RemoteEngine
from sglang_reshard.cli.layouts import Source, Target
from sglang_reshard.errors import Unsupported
from sglang_reshard.selftest import children, engines, models
from sglang_reshard.selftest.choice import ROUTES, Wanted
from sglang_reshard.selftest.environment import environment
from sglang_reshard.selftest.events import EventReader, Row
from sglang_reshard.selftest.host import Host
from sglang_reshard.selftest.job import Job, Run
from sglang_reshard.selftest.progress import Progress
from sglang_reshard.selftest.steps import Steps
from sglang_reshard.selftest.table import conclude
from sglang_reshard.selftest.trainer import Trainer

PARTS = ("first update", "words", "routes", "verified")
_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
_LINK_BYTES, _LINK_TIMES = 1 << 26, 5
_LONGEST = datetime.timedelta(hours=12)


def is_launched() -> bool:
    """Returns True in a process of torchrun or srun. The latter's variables become torch's."""
    for ours, theirs in _SLURM.items():
        if theirs in os.environ and "MASTER_ADDR" in os.environ:
            os.environ.setdefault(ours, os.environ[theirs])
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def selftest(wanted: Wanted, minutes: float) -> int:
    """Returns the exit status; see `launcher.selftest`. Raises Unsupported if all ranks are on one host."""
    gpus = torch.cuda.device_count()
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "cpu:gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    there: list[tuple[str, int]] = [("", 0)] * world
    dist.all_gather_object(there, (socket.gethostname(), gpus))
    engine_host = there[-1][0]
    trainers = [number for number, (name, _) in enumerate(there) if name != engine_host]
    serving = next(number for number, (name, _) in enumerate(there) if name == engine_host)
    if trainers != list(range(serving)):
        raise Unsupported(
            f"{world} ranks are on {len({name for name, _ in there})} hosts: the first ranks have to be on other hosts "
            "than the last one, which serves; without torchrun, `sglang-reshard selftest` tests one host"
        )
    run = _run(wanted, len(trainers), there[serving][1], bool(gpus))
    port = [children.free_port() if rank == 0 else 0]
    dist.broadcast_object_list(port)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port[0], world, rank == 0, timeout=_LONGEST)
    link_s = _link(rank, serving, bool(gpus))
    dist.destroy_process_group()  # the trainer ranks are a world of their own from here on
    if rank == serving:
        _serve(run, store)
    if rank >= serving:
        store.wait(["ended"], _LONGEST)
        store.add("left", 1)
        return 0
    url, key = store.get("server").decode().split()
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "cpu:gloo", store=dist.PrefixStore("trainers", store),
                            rank=rank, world_size=len(trainers))  # fmt: skip
    begin = time.monotonic()
    rows = _train(run, url, key, time.time() + minutes * 60)
    store.set("ended", "")
    while rank == 0 and store.add("left", 0) < world - serving:
        time.sleep(0.1)  # they ask the store, which ends with this process
    if rank != 0:
        return 0
    link = Row(run.name, "limit: a plain transfer of torch between the hosts", None, "", _LINK_BYTES, link_s)
    moved = [
        msgspec.structs.replace(row, limit=link_s * row.nbytes / _LINK_BYTES) if row.route else row for row in rows
    ]
    return conclude(Host.here(), [link, *moved], time.monotonic() - begin)


def _run(wanted: Wanted, trainers: int, engine_gpus: int, on_gpus: bool) -> Run:
    source, target = wanted.source or Source(fsdp=trainers), wanted.target or Target(tp=engine_gpus or 2)
    if source.ranks != trainers:
        raise Unsupported(
            f"--source {source} has {source.ranks} ranks, and {trainers} ranks are on the trainer's hosts"
        )
    # Broadcasts read on one host only, and "auto" is p2p between hosts.
    between = ("auto", "nixl") if importlib.util.find_spec("nixl") else ("auto",)
    routes = between if wanted.routes == ROUTES else wanted.routes
    model = wanted.model or ("qwen3-8b" if on_gpus else models.TINY)
    gpus = tuple(range(target.ranks)) if on_gpus else ()
    return Run(f"between hosts: {source} -> {target}", source, target, model, "bfloat16", (), gpus, PARTS, routes)


def _link(rank: int, peer: int, on_gpus: bool) -> float:
    """Returns the seconds of a transfer from the first trainer rank to the engine's host, by NCCL or gloo."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    tensor, seconds = torch.zeros(_LINK_BYTES, dtype=torch.uint8, device=device), []
    for _ in range(_LINK_TIMES + 1):
        dist.barrier()
        begin = time.perf_counter()
        if rank == 0:
            dist.send(tensor, peer)
        elif rank == peer:
            dist.recv(tensor, 0)
        if on_gpus:
            torch.cuda.synchronize()
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def _serve(run: Run, store: dist.Store) -> None:
    """Serves until the trainer ranks have ended."""
    key = secrets.token_hex(16)
    with (
        tempfile.TemporaryDirectory(prefix="sglang-reshard-run-") as folder,
        socket.socket(type=socket.SOCK_DGRAM) as s,
    ):
        s.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing: the address by which the others reach this host
        address, log = s.getsockname()[0], Path(folder) / "server.log"
        model = Path(folder) / "model"
        models.save(run.model, model, run.source, run.target)
        variables = environment(Path(folder), run.target.ranks, run.device)
        with engines.serving(run, model, variables, log, address, key) as (url, _):
            store.set("server", f"{url} {key}")
            store.wait(["ended"], _LONGEST)


def _train(run: Run, url: str, key: str, ends_at: float) -> list[Row]:
    """Takes the steps. Returns their rows on the first trainer rank."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if run.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory(prefix="sglang-reshard-run-") as folder:
        model = Path(folder) / "model"
        models.save(run.model, model, run.source, run.target)
        trainer = Trainer(models.config(model), run.source, device, models.trainer_dtype(run.model))
        engine = RemoteEngine(url, api_key=key, admin_api_key=key) if dist.get_rank() == 0 else None
        job = Job(run, folder, f"{folder}/events", ends_at)
        with _shown(Path(job.events)) as rows:
            Steps(job, trainer, engine, device, url, key).take()
    return rows


@contextlib.contextmanager
def _shown(events: Path) -> Iterator[list[Row]]:
    """Shows events while the body runs; at its end the list has all rows."""
    rows: list[Row] = []
    ended, reader = threading.Event(), EventReader(events)
    with Progress(Console(stderr=True)) as progress:

        def follow() -> None:
            last = False
            while not last:
                last = ended.wait(0.2)
                for event in reader.new():
                    progress.show(event)
                    if isinstance(event, Row):
                        rows.append(event)
                progress.tick()

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield rows
        finally:
            ended.set()
            thread.join()

"""Connects trainer ranks to servers that somebody else has started, by their URLs."""

from __future__ import annotations

import torch.distributed as dist

from sglang_reshard import MultiEngineSender, RemoteEngine
from sglang_reshard.protocol.session import Session


def connect(urls: list[str]) -> tuple[MultiEngineSender, list[RemoteEngine], Session | None]:
    """Returns the sender, and on rank 0 a client of each server, and the session. Collective.

    Keys are those of the environment. Keep the session: it serves all engines, until the sender is closed. Raises on
    rank 0 what `RemoteEngine.check` raises.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    engines = [RemoteEngine(url) for url in urls] if rank == 0 else []
    for engine in engines:
        engine.check()
    session = Session.host(engines[0].local_address()) if rank == 0 else None
    shared = [session.address if session is not None else None]
    dist.broadcast_object_list(shared, src=0)
    sender = MultiEngineSender(shared[0], trainer_rank=rank, global_ranks=tuple(range(ranks)))
    sends = [engine.update_weights_distributed for engine in engines] or [None] * len(urls)
    sender.set_engines(dict(zip(urls, sends, strict=True)))
    return sender, engines, session


def say(engines: list[RemoteEngine], version: str, prompt: list[int], count: int) -> None:
    """Prints what each engine generates, and from which weights."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    for engine in engines:
        answer = engine.generate(input_ids=prompt, sampling_params=sampling)
        print(f"{version}: {engine.url} says {answer['output_ids']}", flush=True)

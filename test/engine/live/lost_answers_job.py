"""What the trainer ranks of test_server.py do behind a proxy that cuts connections, or beside a server that stops."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import torch
import torch.distributed as dist

from benchmark.reference import greedy_tokens
from server_job import PROMPTS, Served
from sglang_reshard import WeightSender
from sglang_reshard.errors import ReshardError
from sglang_reshard.selftest import text
from sglang_reshard.trainer.collectives import on_first_rank

_READ_BYTES = 1 << 16


class Proxy:
    """Forwards connections to a server.

    cut_s  how long after a request to update weights its connection is closed; None to leave it
    """

    def __init__(self, url: str) -> None:
        self._target = ("127.0.0.1", int(url.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cut_s: float | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(self._target)
            threading.Thread(target=self._forward, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._forward, args=(server, client, False), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, requests: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_READ_BYTES):
                target.sendall(data)
                if requests and self.cut_s is not None and b"/update_weights_distributed" in data:
                    threading.Timer(self.cut_s, lambda: (_shut(source), _shut(target))).start()
        _shut(target)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class Story(Served):
    """The trainer's updates of the server, by the proxy."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        self.proxy = Proxy(job["url"]) if self.rank == 0 else None
        url = on_first_rank(lambda: self.proxy.url if self.proxy else "", self.mesh.get_group())
        key, timeout_s = job["key"], job["timeout_s"]
        self.proxied = WeightSender(url, self.mesh.get_group(), admin_api_key=key, timeout_s=timeout_s)
        self.says: dict[str, list[list[int]]] = {}

    def train(self, version: str) -> None:
        """Changes the weights, and notes what they say."""
        with torch.no_grad():
            for index, parameter in enumerate(self.trainer.model.parameters()):
                torch.manual_seed(1000 * len(self.says) + index)  # another direction, or tokens stay the same
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                local.add_(0.05 * len(self.says) * torch.randn(local.shape[-1]))
        self.trainer.save_checkpoint(self.folder / version)
        dist.barrier()
        tokens, _ = greedy_tokens(self.folder / version, PROMPTS, text.NEW_TOKENS, "float32")
        assert tokens not in self.says.values(), "two versions that say the same show nothing"
        self.says[version] = tokens

    def update(self, version: str, cut_s: float | None = None, **options: Any) -> str:
        """Returns what the trainer was told, and overwrites its weights as the next training step does."""
        if self.proxy is not None:
            self.proxy.cut_s = cut_s
        dist.barrier()
        kept = [parameter.detach().clone() for parameter in self.trainer.model.parameters()]
        try:
            told = self.proxied.update(self.trainer.model.named_parameters(), weight_version=version, **options).message
        except ReshardError as error:
            told = f"{type(error).__name__}: {error}"
        with torch.no_grad():
            for parameter in self.trainer.model.parameters():
                parameter.zero_()
        time.sleep(1.0)  # an engine that was slow has begun by now, and ended
        with torch.no_grad():
            for parameter, weights in zip(self.trainer.model.parameters(), kept, strict=True):
                parameter.copy_(weights)
        dist.barrier()
        return told

    def serves(self) -> list[str]:
        """Returns the names of the weights that the server's tokens are those of."""
        tokens = self.tokens()
        return [version for version, expected in self.says.items() if tokens == expected]

    @contextlib.contextmanager
    def generating(self, tokens: int) -> Iterator[None]:
        """Generates inside of the block, for which an update has to wait."""
        with ThreadPoolExecutor(1) as thread:
            sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
            if self.rank == 0:
                answer = thread.submit(self.server.generate, input_ids=[PROMPTS[0]], sampling_params=sampling)
                time.sleep(0.5)
            yield
            if self.rank == 0:
                answer.result(60)


def lose_answers(job: dict[str, Any]) -> dict[str, Any]:
    story = Story(job)
    seen: dict[str, Any] = {"told": {}, "serves": {}}

    def step(version: str, *, busy: bool = False, **options: Any) -> None:
        story.train(version)
        with story.generating(job["long"]) if busy else contextlib.nullcontext():
            seen["told"][version] = story.update(version, **options)
        seen["serves"][version] = story.serves()

    step("first")
    step("late", busy=True, cut_s=0.1)
    step("after it")
    step("staged", cut_s=0.0, staged=True)
    step("at once", cut_s=0.0)
    step("last")
    seen["torn"] = story.server.weights_info().torn
    story.proxied.close()
    return seen


def stop_the_server(job: dict[str, Any]) -> dict[str, Any]:
    """All processes of the server are stopped for 40 s, longer than the trainer waits."""
    story = Story(job)
    story.train("first")
    told = [story.update("first")]
    story.train("second")
    if story.rank == 0:
        processes = [psutil.Process(job["pid"]), *psutil.Process(job["pid"]).children(recursive=True)]
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
        timer = threading.Timer(40.0, lambda: [os.kill(process.pid, signal.SIGCONT) for process in processes])
        timer.start()
    began = time.monotonic()
    told.append(story.update("second"))
    waited_s = time.monotonic() - began
    if story.rank == 0:
        timer.join()
    time.sleep(3.0)
    health = httpx.get(f"{job['url']}/health", timeout=30).status_code
    dist.barrier()
    serves = [story.serves()]
    told.append(story.update("third"))
    story.says["third"] = story.says["second"]
    serves.append(story.serves())
    story.proxied.close()
    return {"told": told, "serves": serves, "health": health, "waited_s": waited_s}

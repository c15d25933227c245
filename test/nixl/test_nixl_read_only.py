"""What a trainer rank registers can be read by whoever has its NIXL metadata, and not be written."""

from __future__ import annotations

import signal
import time
from typing import Any

import numpy as np
import pytest
import torch

from sglang_reshard.memory.mapping import MemoryExporter
from sglang_reshard.memory.peer_memory import PeerMemory
from sglang_reshard.routes.nixl.reader import NixlReader
from sglang_reshard.routes.nixl.remote_shards import RemoteShards
from sglang_reshard.routes.nixl.source import NixlSource, allocate_readable
from sglang_reshard.routes.relay.progress import Progress
from support.nixl_env import needs_nixl, use_nixl
from support.ready import CONTEXT

pytestmark = needs_nixl
ELEMENTS, VALUE, OTHER = 1 << 18, 7.0, -666.0
DEADLINE_S = 400.0
# UCX writes through other processes' memory where it can, and else asks their own process to, whose kernel refuses it.
WAYS = ["", "tcp"]


def be_trainer(orders: Any, said: Any, ways: str) -> None:
    """Registers a shard that was exported, as `WeightSender` does, and memory of deltas and of relays."""
    use_nixl(ways)
    shard = torch.full((ELEMENTS,), VALUE)
    handles = MemoryExporter(0).export([shard], ["weight"])
    section = allocate_readable(4 * ELEMENTS, torch.device("cpu"), "trainer rank 0").view(torch.float32)
    section.fill_(VALUE)
    progress = Progress("engine rank 0")
    source = NixlSource("trainer rank 0", [shard, progress.word], [section])
    places = [source.place(tensor)[2] for tensor in (shard, section, progress.word)]
    said.put((source.remote.metadata, places, source.writable_bytes, handles))
    while orders.get(timeout=10 * DEADLINE_S) != "end":
        said.put([float(shard.sum()), float(section.sum()), int(progress.word)])


def be_peer(said: Any, metadata: bytes, address: int, nbytes: int, verb: str, ways: str) -> None:
    """Starts a transfer of its own memory with that of the trainer, and tells how it has ended."""
    use_nixl(ways)
    agent = NixlReader(0)
    own = torch.full((nbytes // 4,), OTHER)
    agent.register_ranges([("DRAM", own.data_ptr(), nbytes, 0)])
    agent.connect({"trainer rank 0": RemoteShards(metadata, ())})
    peer, api = agent._peers["trainer rank 0"], agent._agent
    rows = (np.array([[where, nbytes, 0]], np.uint64) for where in (own.data_ptr(), address))
    local, remote = (api.get_xfer_descs(row, "DRAM") for row in rows)
    state = "PROC"
    try:
        transfer = api.initialize_xfer(verb, local, remote, peer, b"")
        api.transfer(transfer)
        deadline = time.monotonic() + DEADLINE_S / 8
        while (state := api.check_xfer_state(transfer)) == "PROC" and time.monotonic() < deadline:
            time.sleep(0.01)
    except Exception as error:  # NIXL's own are of many classes
        state = type(error).__name__
    said.put((state, own[:4].tolist()))


class Trainer:
    """A trainer rank in another process. `memory`: its shard, mapped here, which outlives it."""

    def __init__(self, ways: str) -> None:
        self.ways, self._orders, self._said = ways, CONTEXT.Queue(), CONTEXT.Queue()
        self.process = CONTEXT.Process(target=be_trainer, args=(self._orders, self._said, ways), daemon=True)
        self.process.start()
        self.metadata, self.places, self.writable_bytes, handles = self._said.get(timeout=DEADLINE_S)
        self.memory = PeerMemory(0, handles).view(0, 0, (1,), (ELEMENTS,), torch.float32)

    def values(self) -> list[float]:
        self._orders.put("tell")
        return self._said.get(timeout=DEADLINE_S)

    def peer(self, verb: str, place: int, nbytes: int) -> tuple[str, list[float]]:
        said = CONTEXT.Queue()
        arguments = said, self.metadata, self.places[place], nbytes, verb, self.ways
        process = CONTEXT.Process(target=be_peer, args=arguments, daemon=True)
        process.start()
        try:
            return said.get(timeout=DEADLINE_S)
        finally:
            process.join(5)
            process.kill()

    def end(self) -> None:
        self._orders.put("end")
        self.process.join(5)
        self.process.kill()


@pytest.fixture
def trainer(request: pytest.FixtureRequest) -> Any:
    found = Trainer(request.param)
    yield found
    found.end()


def untouched(trainer: Trainer) -> bool:
    """Whether the shard is as it was: seen from here, as a write may have ended the trainer rank."""
    return bool((trainer.memory == VALUE).all())


@pytest.mark.parametrize("trainer", [""], indirect=True)
def test_a_peer_reads_and_cannot_write(trainer: Trainer) -> None:
    assert trainer.writable_bytes == 0
    for place, nbytes in ((0, 4 * ELEMENTS), (0, 256), (1, 4 * ELEMENTS), (2, 8)):
        state, read = trainer.peer("READ", place, nbytes)
        assert state == "DONE"
        assert place == 2 or read == [VALUE] * 4
        state, _ = trainer.peer("WRITE", place, nbytes)
        assert state not in ("DONE", "PROC")
        assert trainer.values() == [VALUE * ELEMENTS, VALUE * ELEMENTS, 0]
    assert untouched(trainer)
    assert trainer.peer("READ", 0, 4 * ELEMENTS) == ("DONE", [VALUE] * 4), "others still read it"


@pytest.mark.parametrize("trainer", ["tcp"], indirect=True)
def test_over_tcp_a_write_ends_the_trainer_rank_before_it_changes_a_weight(trainer: Trainer) -> None:
    """UCX itself has the process write, which ends it. No optimizer step uses other weights."""
    assert trainer.peer("READ", 0, 4 * ELEMENTS) == ("DONE", [VALUE] * 4)
    trainer.peer("WRITE", 0, 4 * ELEMENTS)
    trainer.process.join(DEADLINE_S / 8)
    assert untouched(trainer)
    assert trainer.process.exitcode == -signal.SIGSEGV

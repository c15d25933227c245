"""Which ways can be gone between ranks that share GPUs or hosts, and what is said of those that cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import pytest

from sglang_reshard.errors import Unsupported
from sglang_reshard.gpu.rank_info import RankGpuInfo
from sglang_reshard.plan import ClusterTopology, RankDemand, RankLocation, TensorIndex, plan_reads, rank_demand
from sglang_reshard.routes import choose_strategy
from sglang_reshard.routes.strategy import Strategy
from sglang_reshard.sources import Mesh, Placement, SourceLayout, SourceTensor
from support.plans import tp_copies

MIB = 1 << 20
GPUS_OF_HOST = 8
SHAPES, DIMS = [(512, 256), (256, 512), (256,)] * 4, [0, 1, -1] * 4
EXPANDABLE = "its GPU memory has no CUDA IPC handle; unset PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
SGLANG, UNSET = {"version": "2.28.9", "NCCL_CUMEM_ENABLE": "0"}, {"version": "2.28.9"}


@dataclass(frozen=True)
class Place:
    """A GPU of a host."""

    host: str
    number: int

    def device(self, nccl: Mapping[str, str]) -> RankGpuInfo:
        return RankGpuInfo(f"GPU-{self.host}-{self.number}", (), "native", dict(nccl))


def places(ranks: int, first: int = 0, of_host: int = GPUS_OF_HOST) -> list[Place]:
    """Ranks one after the other, from GPU number `first` of all hosts on."""
    return [Place(f"host {gpu // of_host}", gpu % of_host) for gpu in range(first, first + ranks)]


@dataclass(frozen=True)
class Cluster:
    """Trainer ranks that shard everything over `shards` of them, with replicas, and the engine ranks of one engine.

    unreadable  returns why an engine rank at the second place cannot map the memory of a trainer rank at the first
    """

    trainers: Sequence[Place]
    engines: Sequence[Place]
    shards: int = 0
    unreadable: Callable[[Place, Place], str] = lambda trainer, engine: ""
    trainer_nccl: Mapping[str, str] = field(default_factory=lambda: UNSET)
    engine_nccl: Mapping[str, str] = field(default_factory=lambda: UNSET)
    trainers_use_gpus: bool = True
    fabric: str = ""

    def layout(self) -> SourceLayout:
        ranks, shards = len(self.trainers), self.shards or len(self.trainers)
        mesh = Mesh((ranks // shards, shards), tuple(range(ranks)))
        tensors = tuple(SourceTensor(f"t{i}", shape, "bfloat16", 0, 0) for i, shape in enumerate(SHAPES))
        return SourceLayout(ranks, (mesh,), ((Placement(), Placement(0)),), tensors)

    def trainer_devices(self) -> tuple[RankGpuInfo, ...]:
        if not self.trainers_use_gpus:
            return ()
        return tuple(self._in_domain(place.device(self.trainer_nccl)) for place in self.trainers)

    def _in_domain(self, device: RankGpuInfo) -> RankGpuInfo:
        return msgspec.structs.replace(device, fabric=self.fabric)

    def planned(self) -> tuple[TensorIndex, list[RankDemand], ClusterTopology]:
        """As engine ranks plan: each for itself, once it has tried the memory of those that it would read."""
        layout = self.layout()
        index, hosts = TensorIndex.of(layout), tuple(place.host for place in self.trainers)
        demands = []
        for rank, (place, copies) in enumerate(
            zip(self.engines, tp_copies(layout, DIMS, len(self.engines)), strict=True)
        ):
            reasons = {
                t: why
                for t, trainer in enumerate(self.trainers)
                if trainer.host == place.host and (why := self.unreadable(trainer, place))
            }
            device = self._in_domain(place.device(self.engine_nccl))
            location = RankLocation(rank, len(self.engines), place.host, hosts, device, self.trainer_devices(), reasons)
            plan = plan_reads(index, copies, location)
            assert sum(nbytes for nbytes, _ in plan.traffic().values()) == plan.least_bytes(), "1.000 of the least"
            demands.append(rank_demand(index, plan, place.host, device, reasons))
        return index, demands, ClusterTopology.of(demands, hosts, self.trainer_devices())

    def chosen(self, transport: str = "auto") -> Strategy:
        index, demands, topology = self.planned()
        strategy = choose_strategy(transport, index, demands, topology, MIB)
        self.check(strategy)
        return strategy

    def check(self, strategy: Strategy) -> None:
        """No GPU is twice in a communicator, and every link's ends are together in exactly one."""
        gpus = [*self.trainers, *self.engines]
        for members in strategy.groups:
            assert len({gpus[m] for m in members}) == len(members)
        for trainer_rank, engine_rank in np.argwhere(strategy.round_bytes).tolist():
            ends = {trainer_rank, len(self.trainers) + engine_rank}
            assert sum(ends <= set(members) for members in strategy.groups) == 1


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_colocated_engines_of_any_size_read_memory(tp):
    for first in range(0, GPUS_OF_HOST, tp):
        cluster = Cluster(places(8), places(tp, first))
        assert cluster.chosen().name == "ipc"
        with pytest.raises(Unsupported, match=rf"trainer rank {first} and engine rank 0 share one GPU .*'ipc'"):
            cluster.chosen("p2p")


@pytest.mark.parametrize(
    ("hosts", "tp", "strategy", "members"),
    [
        (2, 8, "ipc+p2p", [16]),  # trainer ranks of the other host, and the engine's
        (4, 8, "ipc+p2p", [32]),
        (4, 4, "ipc+p2p", [28]),
        (4, 16, "ipc+p2p", [32, 32]),  # trainer ranks of three hosts with the engine ranks of the fourth
        (2, 16, "ipc+p2p", [16, 16]),
        (4, 32, "ipc+p2p", [32] * 4),
    ],
)
def test_engines_on_some_of_the_trainer_hosts(hosts, tp, strategy, members):
    found = Cluster(places(8 * hosts), places(tp)).chosen()
    assert found.name == strategy
    assert [len(group) for group in found.groups] == members


def no_peer_access(trainer: Place, engine: Place) -> str:
    apart = {trainer.number, engine.number} == {0, 7}
    return "there is no peer access between them; look at nvidia-smi topo -p2p r" if apart else ""


def test_a_pair_without_peer_access_is_sent_what_others_read():
    cluster = Cluster(places(8), places(4), unreadable=no_peer_access)
    found = cluster.chosen()
    assert found.name == "ipc+p2p"
    assert np.argwhere(found.round_bytes).tolist() == [[7, 0]]
    assert found.groups == ((7, 8),)
    assert "engine rank 0 cannot map the memory of trainer rank 7: there is no peer access" in found.reason
    with pytest.raises(Unsupported, match=r"engine rank 0 cannot map the memory of trainer rank 7.*'auto'"):
        cluster.chosen("ipc")


def expandable(trainer: Place, engine: Place) -> str:
    return EXPANDABLE


@pytest.mark.parametrize("transport", ["auto", "ipc", "p2p", "broadcast"])
def test_memory_without_handles_on_the_same_gpu_is_refused_with_the_cure(transport):
    cluster = Cluster(places(8), places(4), unreadable=expandable)
    with pytest.raises(Unsupported, match=r"trainer rank \d") as refused:
        cluster.chosen(transport)
    if transport == "auto":
        assert str(refused.value) == (
            f"engine rank 0 cannot map the memory of trainer rank 0: {EXPANDABLE}. Nor can weights be sent: trainer "
            "rank 0 and engine rank 0 share one GPU (GPU-host 0-0), and NCCL accepts a GPU only once in a communicator"
        )


@pytest.mark.parametrize(
    ("trainer_nccl", "engine_nccl", "says"),
    [
        (UNSET, SGLANG, r"trainer rank 0 has NCCL_CUMEM_ENABLE 1, but engine rank 0 has 0.*export"),
        (SGLANG, SGLANG, ""),
        (UNSET | {"NCCL_CUMEM_ENABLE": "1"}, UNSET, ""),  # the default
        (UNSET, UNSET | {"NCCL_P2P_DISABLE": "1"}, r"NCCL_P2P_DISABLE unset, but engine rank 0 has 1.*export"),
        (UNSET | {"NCCL_SHM_DISABLE": "0"}, UNSET, ""),
        (UNSET, UNSET | {"NCCL_NVLS_ENABLE": "0"}, ""),  # NCCL takes the least
        (UNSET, {"version": "2.27.5"}, r"NCCL's version 2.28.9, .*engine rank 0 .*2.27.5.*the same torch"),
    ],
)
def test_nccl_s_settings_have_to_agree_on_one_host(trainer_nccl, engine_nccl, says):
    disjoint = Cluster(places(4), places(4, 4), trainer_nccl=trainer_nccl, engine_nccl=engine_nccl)
    assert disjoint.chosen().name == "ipc"  # without NCCL, they do not matter
    if says:
        with pytest.raises(Unsupported, match=says):
            disjoint.chosen("p2p")
        with pytest.raises(Unsupported, match=says):
            replace(disjoint, unreadable=expandable).chosen()
    else:
        assert disjoint.chosen("p2p").name == "p2p"


def test_nccl_connects_hosts_by_the_network_whatever_their_memory_settings():
    apart = Cluster(places(8), places(8, 8), trainer_nccl=UNSET, engine_nccl=SGLANG)
    assert apart.chosen().name == "p2p"
    with pytest.raises(Unsupported, match=r"NCCL's version"):
        replace(apart, engine_nccl={"version": "2.27.5"}).chosen()


@pytest.mark.parametrize(
    ("trainer_nccl", "engine_nccl", "says"),
    [
        (UNSET, SGLANG, r"trainer rank 0 has NCCL_CUMEM_ENABLE 1, but engine rank 0 has 0"),
        (UNSET, UNSET | {"NCCL_MNNVL_ENABLE": "0"}, r"NCCL_MNNVL_ENABLE 1, but engine rank 0 has 0.*export the same"),
        (UNSET, UNSET | {"NCCL_MNNVL_ENABLE": "2"}, ""),  # the default
        (UNSET, UNSET | {"NCCL_P2P_DISABLE": "1"}, ""),  # within a host
    ],
)
def test_an_nvlink_domain_of_several_hosts_is_one_host_to_nccl(trainer_nccl, engine_nccl, says):
    apart = Cluster(places(8), places(8, 8), trainer_nccl=trainer_nccl, engine_nccl=engine_nccl)
    assert apart.chosen("p2p").name == "p2p"
    together = replace(apart, fabric="a domain")
    if says:
        with pytest.raises(Unsupported, match=says):
            together.chosen("p2p")
    else:
        assert together.chosen("p2p").name == "p2p"


@pytest.mark.parametrize("setting", ["NCCL_MAX_CTAS", "NCCL_MIN_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS"])
def test_limits_of_channels_have_to_agree_wherever_the_ranks_are(setting):
    apart = Cluster(places(8), places(8, 8), trainer_nccl=UNSET, engine_nccl=UNSET | {setting: "8"})
    with pytest.raises(Unsupported, match=f"{setting} unset, but engine rank 0 has 8"):
        apart.chosen("p2p")


def test_settings_of_engine_ranks_that_broadcast_have_to_agree():
    class Differing(Place):
        def device(self, nccl):
            return super().device(nccl | ({"NCCL_SHM_DISABLE": "1"} if self.number == 3 else {}))

    engines = [Differing(place.host, place.number) for place in places(4)]
    with pytest.raises(Unsupported, match="engine rank 0 has NCCL_SHM_DISABLE unset, but engine rank 3 has 1"):
        Cluster(places(1), engines).chosen("broadcast")


def test_trainer_ranks_without_gpus_cannot_send_to_gpus():
    apart = Cluster(places(2), places(2, 8), trainers_use_gpus=False)
    with pytest.raises(Unsupported, match=r"trainer rank 0 uses no GPU.*torch.cuda.set_device"):
        apart.chosen("p2p")
    with pytest.raises(Unsupported, match=r"engine rank 0 on host 1 needs .*trainer rank 0 uses no GPU.*set_device"):
        apart.chosen()
    assert Cluster(places(2), places(2), trainers_use_gpus=False).chosen().name == "ipc"  # from shared memory


def test_auto_broadcasts_what_cannot_be_sent_if_that_can_be_done():
    """Engine ranks of two hosts read host memory there. NCCL sends to them from GPUs only: from each other."""
    cluster = Cluster(places(2, 7), places(2, 7), trainers_use_gpus=False)
    found = cluster.chosen()
    assert found.name == "broadcast"
    assert found.reason == "auto: not ipc+p2p: trainer rank 0 uses no GPU, and NCCL sends between GPUs only"
    assert found.digest() == cluster.chosen("broadcast").digest()
    with pytest.raises(Unsupported, match="engine rank 1 on host 1 needs shards"):
        cluster.chosen("ipc")


def test_broadcasts_are_led_by_ranks_that_can_read():
    """Engine rank 0 would lead trainer rank 7's, by its position."""
    whole = [Place("host 0", 7), Place("host 0", 6)]
    cluster = Cluster(whole, places(4), unreadable=no_peer_access)
    plan = cluster.chosen("broadcast").broadcasts
    assert plan is not None
    assert {group.leader for group in plan.groups if group.trainer_rank == 0} & {0} == set()
    assert any(0 in group.members for group in plan.groups if group.trainer_rank == 0)

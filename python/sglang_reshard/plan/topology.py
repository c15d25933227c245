"""Tells which ranks share a host or a GPU, and which can reach each other: by memory handle, or through NCCL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_reshard.errors import Unsupported
from sglang_reshard.gpu.rank_info import CHANNEL_SETTINGS, DOMAIN_SETTINGS, HOST_SETTINGS, RankGpuInfo
from sglang_reshard.plan.read_plan import RankDemand

_VERSION = "NCCL's version"
_CURES = {
    _VERSION: "install the same torch for trainer and engine",
    "NCCL_CUMEM_ENABLE": "export NCCL_CUMEM_ENABLE=0 for trainer and engine before they start, as SGLang does for its "
    "own processes where it is unset",
}


def peer_name(peer_id: int, trainer_ranks: int) -> str:
    """Returns the rank that a peer id stands for, for messages: a trainer rank, or their number plus an engine rank."""
    return f"trainer rank {peer_id}" if peer_id < trainer_ranks else f"engine rank {peer_id - trainer_ranks}"


@dataclass(frozen=True, slots=True)
class ClusterTopology:
    """Hosts and GPUs of all ranks, by rank.

    unreadable  (trainer rank, engine rank) on one host -> why the engine rank cannot map the trainer rank's memory
    """

    trainer_hosts: tuple[str, ...]
    engine_hosts: tuple[str, ...]
    trainer_devices: tuple[RankGpuInfo, ...]
    engine_devices: tuple[RankGpuInfo, ...]
    unreadable: dict[tuple[int, int], str]

    @classmethod
    def of(
        cls,
        demands: Sequence[RankDemand],
        trainer_hosts: Sequence[str],
        trainer_devices: Sequence[RankGpuInfo] = (),
    ) -> ClusterTopology:
        """Returns the topology of engine ranks with these demands. No `trainer_devices`: no trainer rank uses a GPU."""
        return cls(
            tuple(trainer_hosts),
            tuple(demand.host for demand in demands),
            tuple(trainer_devices) or (RankGpuInfo(),) * len(trainer_hosts),
            tuple(demand.device for demand in demands),
            {(t, e): why for e, demand in enumerate(demands) for t, why in demand.unreadable.items()},
        )

    @property
    def on_gpu(self) -> bool:
        """True if engine ranks run on GPUs. Messages then go through NCCL, else through gloo."""
        return any(device.uuid for device in self.engine_devices)

    def same_host(self, trainer_rank: int, engine_rank: int) -> bool:
        return self.trainer_hosts[trainer_rank] == self.engine_hosts[engine_rank]

    def same_gpu(self, trainer_rank: int, engine_rank: int) -> bool:
        gpu = self.engine_devices[engine_rank].uuid
        return bool(gpu) and self.trainer_devices[trainer_rank].uuid == gpu

    def can_read(self, trainer_rank: int, engine_rank: int) -> bool:
        """Returns whether the engine rank can map the trainer rank's memory."""
        return self.same_host(trainer_rank, engine_rank) and (trainer_rank, engine_rank) not in self.unreadable

    def why_unreadable(self, trainer_rank: int, engine_rank: int) -> str:
        """Returns why the engine rank cannot read the trainer rank's memory, as a clause."""
        engine_host = self.engine_hosts[engine_rank]
        reason = self.unreadable.get((trainer_rank, engine_rank))
        if reason:
            return f"engine rank {engine_rank} cannot map the memory of trainer rank {trainer_rank}: {reason}"
        return (
            f"engine rank {engine_rank} on {engine_host} needs shards that no trainer rank on that host holds (trainer "
            f"rank {trainer_rank} on {self.trainer_hosts[trainer_rank]} does)"
        )

    def sharing_gpu(self, members: Iterable[int]) -> tuple[int, int] | None:
        """Returns the first two peer ids of `members` that are on one GPU; None without any, and where gloo is used."""
        devices, seen = (*self.trainer_devices, *self.engine_devices), dict[str, int]()
        for member in members if self.on_gpu else ():
            if (gpu := devices[member].uuid) and gpu in seen:
                return seen[gpu], member
            seen[gpu] = member
        return None

    def check_communicator(self, members: Sequence[int], *, cure: str = "") -> None:
        """Raises Unsupported, with a remedy, if NCCL would not connect the ranks with these peer ids.

        cure  the remedy where an engine rank has the GPU of another member
        """
        if not self.on_gpu:  # gloo connects any ranks
            return
        hosts, devices = (*self.trainer_hosts, *self.engine_hosts), (*self.trainer_devices, *self.engine_devices)
        if sharing := self.sharing_gpu(members):
            one, another = (peer_name(member, len(self.trainer_hosts)) for member in sharing)
            raise Unsupported(
                f"{one} and {another} share one GPU ({devices[sharing[0]].uuid}), and NCCL accepts a GPU only once in "
                "a communicator",
                cure="give each trainer rank its own GPU" if sharing[1] < len(self.trainer_hosts) else cure,
            )
        first: dict[tuple[str, str], tuple[str, str]] = {}  # (where it is shared, setting) -> (rank, value)
        for member in members:
            name, device = peer_name(member, len(self.trainer_hosts)), devices[member]
            if not device.uuid:
                raise Unsupported(
                    f"{name} uses no GPU, and NCCL sends between GPUs only",
                    cure="call torch.cuda.set_device and torch.cuda.init on every trainer rank, or update an engine on "
                    "the same host with transport='ipc'",
                )
            machine = "/".join(hosts[member].split("/")[:2])  # of other users and PID namespaces, too
            shared = [("", CHANNEL_SETTINGS), (f"host {machine}", HOST_SETTINGS)]
            if device.fabric:
                shared.append((f"NVLink domain {device.fabric}", DOMAIN_SETTINGS))
            values = {("", _VERSION): device.nccl.get("version", "")}
            values |= {(where, setting): _effective(setting, device.nccl) for where, of in shared for setting in of}
            for key, value in values.items():
                other, expected = first.setdefault(key, (name, value))
                if value != expected:
                    raise Unsupported(
                        f"{other} has {key[1]} {expected or 'unset'}, but {name} has {value or 'unset'}, and NCCL "
                        "would not connect them",
                        cure=_CURES.get(key[1], f"export the same {key[1]} for trainer and engine"),
                    )


def _effective(setting: str, nccl: dict[str, str]) -> str:
    """Returns a setting's value, the same for values that mean the same."""
    value = nccl.get(setting, "")
    if setting in ("NCCL_CUMEM_ENABLE", "NCCL_MNNVL_ENABLE"):
        return "0" if value == "0" else "1"  # on by default
    if setting in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        return value if value != "0" else ""
    return value

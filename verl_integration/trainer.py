"""A trainer rank's part in verl's syncs: the engine's shards, and the sessions with all replicas."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import ray
import torch.distributed as dist

from sglang_reshard.api.multi_engine import MultiEngineSender
from sglang_reshard.control import Address
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.protocol.session import Session
from sglang_reshard.trainer.collectives import gather_messages
from sglang_reshard.trainer.coordinator import Send
from sglang_reshard.verl.export import Export
from sglang_reshard.verl.metrics import metrics_of, reasons_of
from sglang_reshard.verl.settings import Settings

logger = logging.getLogger(__name__)
# Of the last sync in this process; verl drops what a colocated sync returns, so `driver` asks for it.
_last_metrics: dict[str, float] = {}


def world() -> dist.ProcessGroup:
    """All trainer ranks. In verl it has a gloo backend for CPU tensors."""
    assert dist.group.WORLD is not None, "verl's actor workers have a process group"
    return dist.group.WORLD


class TrainerRank:
    """This rank's end of the sessions with all replicas of one checkpoint-engine manager.

    Trainer ranks are the ranks of torch.distributed's world.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.rank = dist.get_rank()
        self._host: Session | None = None
        self._fleet: MultiEngineSender | None = None
        self._export = Export(lambda message, kind: gather_messages(message, kind, world()))
        self._version: int | None = None
        self._said = ""

    def host(self) -> Address | None:
        """Trainer rank 0: the address of the hub where all meet; None on the others."""
        if self.rank == 0 and self._host is None:
            interface = self._settings.interface or ray.util.get_node_ip_address().strip("[]")
            self._host = Session.host(interface, self._settings.timeout)
        return self._host.address if self._host else None

    def attend(self, address: Address, engines: Mapping[str, Send | None]) -> None:
        """The replicas there are now, by a name for each one's life. Every trainer rank calls it alike."""
        if self._fleet is None:
            self._fleet = MultiEngineSender(
                address,
                trainer_rank=self.rank,
                global_ranks=tuple(range(dist.get_world_size())),
                transport=self._settings.transport,
                bucket_bytes=self._settings.bucket_bytes,
                timeout_s=self._settings.timeout,
            )
        self._fleet.attend(engines)

    def update(self, engine: Any, global_steps: int | None) -> dict[str, float]:
        """Bring all replicas to the engine's weights; the metrics of it. Every trainer rank calls it."""
        assert self._fleet is not None, "attend() comes first"
        started = time.perf_counter()
        with self._export.tensors(engine) as (named_tensors, leaving):
            reports = self._fleet.update(
                named_tensors,
                # verl syncs a step again, after validation for one; an engine takes a version once.
                weight_version=None if global_steps is None or global_steps == self._version else str(global_steps),
                ignore=self._settings.ignore,
                check_finite=self._settings.check_finite,
                verify=self._settings.verify,
                staged=self._settings.staged,
                let_go=leaving,
            )
            if leaving:
                self._fleet.release()
        self._version = global_steps
        metrics = metrics_of(reports, time.perf_counter() - started)
        self._remember(reports, metrics)
        return metrics

    def _remember(self, reports: dict[str, UpdateReport], metrics: dict[str, float]) -> None:
        _last_metrics.clear()
        _last_metrics.update(metrics)
        said = reasons_of(reports)
        if self.rank == 0 and said != self._said:
            logger.warning("reshard: %s", said)  # verl shows warnings only
            self._said = said


def take_metrics() -> dict[str, float]:
    """The metrics of the last sync in this process, once."""
    taken = dict(_last_metrics)
    _last_metrics.clear()
    return taken

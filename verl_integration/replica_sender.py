"""Sends a trainer rank's shards to all replicas of a checkpoint engine manager."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import ray
import torch.distributed as dist

from sglang_reshard.api.multi_engine import MultiEngineSender
from sglang_reshard.api.remote_engine import RemoteEngine
from sglang_reshard.control import Address
from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.extras.asynchronous.background import UpdateHandle
from sglang_reshard.extras.finite import first_not_finite
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.protocol.messages import LoraAdapter
from sglang_reshard.protocol.session import Session
from sglang_reshard.sources import NamedTensors
from sglang_reshard.trainer.coordinator import Send
from sglang_reshard.trainer.options import SenderOptions, UpdateOptions
from sglang_reshard.verl.engine_shards import EngineShards, lora_adapter
from sglang_reshard.verl.metrics import sync_metrics, transport_reasons
from sglang_reshard.verl.settings import Settings

logger = logging.getLogger(__name__)
_NO_REPLICAS = "this trainer rank knows no replicas yet; call init_process_group before the first sync"
# Of the last sync in this process; verl drops what a colocated sync returns, so `driver_hooks` asks for it.
_last_metrics: dict[str, float] = {}


def world() -> dist.ProcessGroup:
    """Returns the group of all trainer ranks. In verl it has a gloo backend for CPU tensors. Raises Unsupported."""
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        raise Unsupported("this actor worker has no process group; call torch.distributed.init_process_group first")
    return group


class _Background(NamedTuple):
    """A sync whose update runs in the background."""

    handle: UpdateHandle[dict[str, UpdateReport]]
    global_steps: int | None


class ReplicaSender:
    """One trainer rank's sessions with all replicas. Trainer ranks are the ranks of torch.distributed's world."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.failed: set[str] = set()  # replicas, in the last sync
        self.rank = dist.get_rank(world())
        self._host: Session | None = None
        self._sender: MultiEngineSender | None = None
        self._adapter_sender: MultiEngineSender | None = None
        self._address: Address | None = None
        self._replicas: Mapping[str, Send | None] = {}
        self._shards = EngineShards(self.rank, dist.get_world_size())
        self._version: int | None = None
        self.global_steps: int | None = None  # whose weights the replicas have; None before their first
        self._background: _Background | None = None
        self._logged = ""

    def host(self) -> Address | None:
        """Starts the control server on trainer rank 0, and returns its address; None on the others."""
        if self.rank == 0 and self._host is None:
            interface = self._settings.interface or ray.util.get_node_ip_address().strip("[]")
            self._host = Session.host(interface, self._settings.sender.timeout_s)
        return self._host.address if self._host else None

    def set_replicas(self, address: Address, urls: Mapping[str, str]) -> None:
        """Sets the current replicas: name -> URL of the server. A restarted replica has another name. Collective."""
        replicas = {name: self._send_to(url) if self.rank == 0 else None for name, url in urls.items()}
        if self._sender is None:
            self._sender = self._multi_sender(address, self._settings.sender, relay=self._settings.relay)
        self._sender.wait_for_background()
        if self.failed & replicas.keys():  # back already: a failure counts until a call without the replica
            self._sender.set_engines({name: send for name, send in replicas.items() if name not in self.failed})
        self._sender.set_engines(replicas)
        self._address, self._replicas = address, replicas

    def _send_to(self, url: str) -> Send:
        engine = functools.cache(lambda: RemoteEngine(url, timeout_s=self._settings.sender.timeout_s))
        return lambda request: engine().update_weights_distributed(request)

    def update(self, engine: Any, global_steps: int | None) -> dict[str, float]:
        """Updates all replicas to the training engine's weights. Returns the sync's metrics. Collective."""
        if self._sender is None:
            raise Unsupported(_NO_REPLICAS)
        started = time.perf_counter()
        with self._shards.tensors(engine) as (named_tensors, temporary, partial):
            return self._sync(self._sender, engine, named_tensors, temporary, global_steps, started, partial)

    def update_adapter(self, engine: Any, global_steps: int | None) -> dict[str, float]:
        """Updates the LoRA adapter that all replicas serve to the training engine's. Otherwise as `update`."""
        from verl.workers.rollout.sglang_rollout.utils import SGLANG_LORA_NAME

        started = time.perf_counter()
        config, named_tensors, temporary = lora_adapter(engine)
        lora = (LoraAdapter(SGLANG_LORA_NAME, config),)
        if self._adapter_sender is None:
            if self._address is None:
                raise Unsupported(_NO_REPLICAS)
            options = replace(self._settings.sender, delta="off")
            self._adapter_sender = self._multi_sender(self._address.named("lora"), options)
        self._adapter_sender.set_engines(self._replicas)
        return self._sync(self._adapter_sender, engine, named_tensors, temporary, global_steps, started, lora=lora)

    def _multi_sender(self, address: Address, options: SenderOptions, *, relay: bool = False) -> MultiEngineSender:
        ranks = tuple(range(dist.get_world_size()))
        return MultiEngineSender(address, trainer_rank=self.rank, global_ranks=ranks, relay=relay, options=options)

    def _sync(
        self,
        sender: MultiEngineSender,
        engine: Any,
        named_tensors: NamedTensors,
        temporary: bool,
        global_steps: int | None,
        started: float,
        partial: bool = False,
        lora: tuple[LoraAdapter, ...] = (),
    ) -> dict[str, float]:
        """`temporary`: the shards' memory is freed afterwards. Raises Mismatch for weights that `check_finite`
        refuses.
        """
        if self._settings.check_finite and (found := first_not_finite(named_tensors, world())):
            raise Mismatch(f"{found}. Nothing was sent. Look at the optimizer step, or set check_finite=False")
        # verl may sync a step again, after validation for example; an engine accepts a version once.
        version = None if global_steps is None or global_steps == self._version else str(global_steps)
        frees = temporary or bool(engine.is_param_offload_enabled)
        in_background = self._settings.asynchronous
        unmap = frees if in_background else temporary
        options = replace(self._settings.update, weight_version=version, unmap_after=unmap, partial=partial, lora=lora)
        self.failed, self._version = set(), global_steps
        if in_background:
            return self._sync_in_background(sender, named_tensors, options, global_steps)
        reports = sender.update(named_tensors, options, on_failure=self._settings.on_failure)
        if frees:  # views would keep what verl moves to the GPU next
            sender.release()
        self.global_steps = global_steps
        return self._metrics_of(reports, time.perf_counter() - started)

    def _sync_in_background(
        self,
        sender: MultiEngineSender,
        named_tensors: NamedTensors,
        options: UpdateOptions,
        global_steps: int | None,
    ) -> dict[str, float]:
        """Copies the shards, and starts the update. The metrics that are named so are those of the sync before.

        The first sync waits: until then replicas may have no weights at all.
        """
        handle = sender.update_async(named_tensors, options, on_failure=self._settings.on_failure)
        current = _Background(handle, global_steps)
        ended, self._background = self._background or current, current
        reports = ended.handle.wait()
        assert reports is not None, "it was not skipped"
        self.global_steps = ended.global_steps
        metrics = self._metrics_of(reports, max(report.seconds.get("total", 0.0) for report in reports.values()))
        if ended is not current:
            metrics = {name.replace("reshard/", "reshard/previous/", 1): value for name, value in metrics.items()}
        metrics["reshard/stall_seconds"] = handle.waited_s + handle.copied_s
        if global_steps is not None and self.global_steps is not None:
            metrics["reshard/staleness"] = float(global_steps - self.global_steps)
        return metrics

    def _metrics_of(self, reports: dict[str, UpdateReport], seconds: float) -> dict[str, float]:
        self.failed = {name for name, report in reports.items() if not report.success}
        reports = {name: report for name, report in reports.items() if name not in self.failed}
        metrics = sync_metrics(reports, seconds)
        _last_metrics.clear()
        _last_metrics.update(metrics)
        reasons = transport_reasons(reports)
        if self.rank == 0 and reasons != self._logged:
            logger.warning("reshard: %s", reasons)  # verl shows warnings only
            self._logged = reasons
        return metrics


def take_metrics(_worker: Any) -> dict[str, float]:
    """Returns the metrics of the last sync in this process, once. The driver calls it in a worker."""
    metrics = dict(_last_metrics)
    _last_metrics.clear()
    return metrics

"""VerlEngine: one engine, driven by all trainer ranks in step (SPMD), as SGLang once had it.

    engine = VerlEngine(device_mesh_cpu=mesh["tp"], tp_size=16, model_path=...)    # on every trainer rank
    report = engine.update_weights_from_tensor(model.named_parameters())           # DTensors stay local
    out = engine.generate(input_ids=[[1, 2, 3]], sampling_params={"max_new_tokens": 8})
    engine.shutdown()

The engine runs on the first trainer rank of every node; the others hold none and only take part.
Everything that comes back, comes back on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.distributed.device_mesh import DeviceMesh

from sglang_reshard.collectives import broadcast_message
from sglang_reshard.errors import Unsupported
from sglang_reshard.launch import require_main_guard, without_torchrun_variables
from sglang_reshard.messages import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_TIMEOUT_S,
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    Failure,
)
from sglang_reshard.report import UpdateReport
from sglang_reshard.sender import WeightSender
from sglang_reshard.sources import NamedTensors

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine


class VerlEngine:
    """An SGLang engine that takes its weights from the trainer ranks of `device_mesh_cpu`.

    device_mesh_cpu  1-D mesh of the trainer ranks, with a CPU (gloo) backend
    nnodes           nodes that the engine spans; the mesh's ranks are spread evenly over them
    backend          "engine"; SGLang's old "server" backend is not carried
    tp_size          the engine's tensor parallel size; the mesh's size when not given
    interface        address of the first rank's host that engine ranks reach it by; loopback suits one node
    transport, bucket_bytes, timeout_s   of updates, see `WeightSender`
    server_args      all else goes to `sglang.Engine`
    """

    def __init__(
        self,
        device_mesh_cpu: DeviceMesh,
        nnodes: int = 1,
        backend: str = "engine",
        *,
        tp_size: int | None = None,
        transport: str = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        interface: str = "127.0.0.1",
        **server_args: Any,
    ) -> None:
        require_main_guard()
        if backend != "engine":
            raise Unsupported(f"backend={backend!r} is not carried; use backend='engine'")
        if device_mesh_cpu.ndim != 1:
            raise Unsupported(
                f"device_mesh_cpu has {device_mesh_cpu.ndim} dimensions; give one of them, mesh['tp'] for example"
            )
        if device_mesh_cpu.size() % nnodes:
            raise Unsupported(f"{device_mesh_cpu.size()} trainer ranks cannot be spread over {nnodes} nodes")
        if nnodes > 1 and interface.startswith("127."):
            raise Unsupported(
                f"nnodes={nnodes}, but the session listens on {interface}, which other nodes cannot reach; "
                "pass interface=, the first node's address in your private network"
            )
        self._group = device_mesh_cpu.get_group()
        self._rank = device_mesh_cpu.get_local_rank()
        self.engine: Engine | None = None
        ranks_per_node = device_mesh_cpu.size() // nnodes
        arguments = {
            "tp_size": tp_size or device_mesh_cpu.size(),
            "nnodes": nnodes,
            "node_rank": self._rank // ranks_per_node,
            **server_args,
        }
        if self._rank % ranks_per_node == 0 and self._rank != 0:
            self.engine = _start_engine(arguments)
        self._on_first_rank(lambda: self._start_first(arguments))
        self._sender = WeightSender.over(
            self._group,
            self._send if self._rank == 0 else None,
            transport=transport,
            bucket_bytes=bucket_bytes,
            timeout_s=timeout_s,
            interface=interface,
        )

    def update_weights_from_tensor(
        self,
        named_tensors: NamedTensors | torch.nn.Module,
        load_format: str | None = None,
        **options: Any,
    ) -> UpdateReport:
        """Bring the engine to these weights. Every rank calls it, with its own shards.

        named_tensors  all of the model's, under their checkpoint names: DTensors, or tensors that every rank holds;
                       or the module itself
        options        weight_version and what else `WeightSender.update` takes
        """
        if load_format is not None:
            raise Unsupported(f"load_format={load_format!r}: the engine's own loader decides; leave it out")
        return self._sender.update(named_tensors, **options)

    def generate(
        self,
        prompt: list[str] | str | None = None,
        sampling_params: list[dict[str, Any]] | dict[str, Any] | None = None,
        input_ids: list[list[int]] | list[int] | None = None,
        image_data: Any = None,
        return_logprob: list[bool] | bool = False,
        logprob_start_len: list[int] | int | None = None,
        top_logprobs_num: list[int] | int | None = None,
        token_ids_logprob: list[list[int]] | list[int] | None = None,
        lora_path: list[str | None] | str | None = None,
        custom_logit_processor: list[str] | str | None = None,
    ) -> Any:
        """SGLang's `Engine.generate` on the first rank, its output on every rank (tensors in it become lists).

        Raises TornWeights while the last update broke off half-way. The other ranks wait for as long as it generates;
        the group's own timeout bounds that.
        """
        arguments = {
            "prompt": prompt,
            "sampling_params": sampling_params,
            "input_ids": input_ids,
            "image_data": image_data,
            "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len,
            "top_logprobs_num": top_logprobs_num,
            "token_ids_logprob": token_ids_logprob,
            "lora_path": lora_path,
            "custom_logit_processor": custom_logit_processor,
        }
        return self._on_first_rank(lambda: self._first.generate(**arguments))

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        def call() -> None:
            self._first.release_memory_occupation(tags)

        self._on_first_rank(call)

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        def call() -> None:
            self._first.resume_memory_occupation(tags)

        self._on_first_rank(call)

    def shutdown(self) -> None:
        """End the engine's processes, and no others. Every rank calls it."""
        from sglang_reshard.patches.engine import end

        self._sender.close()
        if self.engine is not None:
            end(self.engine)
            self.engine = None

    @property
    def _first(self) -> Engine:
        assert self.engine is not None, "only the first rank calls this"
        return self.engine

    def _start_first(self, arguments: dict[str, Any]) -> None:
        from sglang_reshard.patches.engine import check_installed, end

        engine = _start_engine(arguments)
        try:
            check_installed(engine)
        except Unsupported:
            end(engine)
            raise
        self.engine = engine

    def _send(self, request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
        return self._first.update_weights_distributed(request)

    def _on_first_rank(self, call: Callable[[], Any]) -> Any:
        """Make the call on the first rank; its result, or its error, on every rank."""
        outcome = cause = None
        if self._rank == 0:
            try:
                outcome = _Outcome(value=call())
            except Exception as error:
                cause = error
                outcome = _Outcome(failure=Failure.of(error))
        outcome = broadcast_message(outcome, _Outcome, self._group)
        if outcome.failure is not None:
            raise outcome.failure.error() from cause
        return outcome.value


class _Outcome(msgspec.Struct, frozen=True):
    value: Any = None
    failure: Failure | None = None


def _start_engine(arguments: dict[str, Any]) -> Engine:
    from sglang.srt.entrypoints.engine import Engine

    from sglang_reshard.patches.engine import outlive

    # Else an engine on a node other than the first never returns from its constructor.
    os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    with without_torchrun_variables():
        engine = Engine(**arguments)
    outlive(engine)
    return engine

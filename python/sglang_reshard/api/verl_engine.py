"""VerlEngine: one engine, driven by all trainer ranks in step (SPMD), as SGLang once had it.

    engine = VerlEngine(device_mesh_cpu=mesh["tp"], tp_size=16, model_path=...)    # on every trainer rank
    report = engine.update_weights_from_tensor(model.named_parameters())           # DTensors stay local
    out = engine.generate(input_ids=[[1, 2, 3]], sampling_params={"max_new_tokens": 8})
    engine.shutdown()

The engine runs on the first trainer rank of every node; the others hold none and only take part. A server that runs
on its own takes its place with another constructor, and all else stays as it is:

    engine = VerlEngine(device_mesh_cpu=mesh["tp"], backend="server", url="http://gpu7:30000", admin_api_key=...)

Everything that comes back, comes back on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.distributed.device_mesh import DeviceMesh

from sglang_reshard.api.remote_engine import RemoteEngine
from sglang_reshard.api.weight_sender import WeightSender, connect_server
from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.patches.embedded_engine import EmbeddedEngine
from sglang_reshard.patches.launch import require_main_guard
from sglang_reshard.protocol.messages import DEFAULT_BUCKET_BYTES, DEFAULT_TIMEOUT_S, PauseMode
from sglang_reshard.protocol.session import LOOPBACK
from sglang_reshard.protocol.weights_info import WeightsInfo
from sglang_reshard.sources import NamedTensors
from sglang_reshard.trainer.collectives import on_first_rank

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine


class VerlEngine:
    """An SGLang engine that takes its weights from the trainer ranks of `device_mesh_cpu`.

    device_mesh_cpu  1-D mesh of the trainer ranks, with a CPU (gloo) backend
    nnodes           nodes that the engine spans; the mesh's ranks are spread evenly over them
    backend          "engine": started here. "server": one that runs already, at `url`
    url, api_key, admin_api_key   of the server, see `RemoteEngine`, also for where they are looked for otherwise
    tp_size          the engine's tensor parallel size; the mesh's size when not given
    interface        address of the first rank's host that engine ranks reach it by; loopback suits one node, and for
                     a server it is the one from which this host reaches it
    transport, bucket_bytes, timeout_s   of updates, see `WeightSender`
    server_args      all else goes to `sglang.Engine`
    """

    def __init__(
        self,
        device_mesh_cpu: DeviceMesh,
        nnodes: int = 1,
        backend: str = "engine",
        *,
        url: str | None = None,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        tp_size: int | None = None,
        transport: str = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        interface: str | None = None,
        **server_args: Any,
    ) -> None:
        if device_mesh_cpu.ndim != 1:
            raise Unsupported(
                f"device_mesh_cpu has {device_mesh_cpu.ndim} dimensions; give one of them, mesh['tp'] for example"
            )
        self._group = device_mesh_cpu.get_group()
        self._rank = device_mesh_cpu.get_local_rank()
        self._local: EmbeddedEngine | RemoteEngine | None = None
        self._paused = False
        if backend == "engine":
            of_server = {"url": url, "api_key": api_key, "admin_api_key": admin_api_key}
            _check_nothing_given(of_server, "backend='engine'", "they are a server's; give backend='server' for one")
            require_main_guard()
            interface = interface or LOOPBACK
            _check_nodes(device_mesh_cpu.size(), nnodes, interface)
            ranks_per_node = device_mesh_cpu.size() // nnodes
            arguments = {
                "tp_size": tp_size or device_mesh_cpu.size(),
                "nnodes": nnodes,
                "node_rank": self._rank // ranks_per_node,
                **server_args,
            }
            self._start(arguments, ranks_per_node)
        elif backend == "server":
            of_engine = {**server_args, "tp_size": tp_size, "nnodes": None if nnodes == 1 else nnodes}
            _check_nothing_given(of_engine, "backend='server'", "the server has what it was started with")
            self._local, reached = connect_server(
                self._group, url, api_key=api_key, admin_api_key=admin_api_key, timeout_s=timeout_s
            )
            interface = interface or reached
        else:
            raise Unsupported(f"backend={backend!r} is not carried; use backend='engine' or backend='server'")
        self._sender = WeightSender.over(
            self._group,
            self._first.update_weights_distributed if self._rank == 0 else None,
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

        Raises TornWeights while the last update broke off half-way, and Mismatch while paused. The other ranks wait for
        as long as it generates; the group's own timeout bounds that.
        """
        if self._paused:
            raise Mismatch("generation is paused, so nothing would be generated; call continue_generation first")
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
        """Let go of the memory of "weights", of "kv_cache", or of all. Weights come back with the next update."""
        self._on_first_rank(lambda: self._first.release_memory_occupation(tags))

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        self._on_first_rank(lambda: self._first.resume_memory_occupation(tags))

    def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Stop what others ask of the engine, so that an update need not wait for it; see the modes in the guide."""
        self._on_first_rank(lambda: self._first.pause_generation(mode))
        self._paused = True

    def continue_generation(self) -> None:
        self._on_first_rank(lambda: self._first.continue_generation())
        self._paused = False

    def flush_cache(self) -> None:
        """Forget all prefixes. Raises EngineRefused while requests run."""
        self._on_first_rank(lambda: self._first.flush_cache())

    def weights_info(self) -> WeightsInfo:
        """Which weights are live, and how they came."""
        told = self._on_first_rank(lambda: msgspec.to_builtins(self._first.weights_info()))
        return msgspec.convert(told, WeightsInfo)

    def shutdown(self) -> None:
        """End the session, and the processes of an engine that was started here. Every rank calls it.

        A server goes on with the weights that it has.
        """
        self._sender.close()
        if self._local is not None:
            self._local.close()
            self._local = None

    @property
    def engine(self) -> Engine | None:
        """SGLang's own, on the first rank of every node; None on others, and where the engine is a server."""
        return self._local.engine if isinstance(self._local, EmbeddedEngine) else None

    @property
    def _first(self) -> EmbeddedEngine | RemoteEngine:
        assert self._local is not None, "only the first rank calls this"
        return self._local

    def _start(self, arguments: dict[str, Any], ranks_per_node: int) -> None:
        if self._rank % ranks_per_node == 0 and self._rank != 0:
            self._local = EmbeddedEngine.start(arguments)

        def start_first() -> None:
            self._local = EmbeddedEngine.start_checked(arguments)

        self._on_first_rank(start_first)

    def _on_first_rank(self, call: Callable[[], Any]) -> Any:
        return on_first_rank(call, self._group)


def _check_nodes(trainer_ranks: int, nnodes: int, interface: str) -> None:
    if trainer_ranks % nnodes:
        raise Unsupported(f"{trainer_ranks} trainer ranks cannot be spread over {nnodes} nodes")
    if nnodes > 1 and interface.startswith("127."):
        raise Unsupported(
            f"nnodes={nnodes}, but the session listens on {interface}, which other nodes cannot reach; "
            "pass interface=, the first node's address in your private network"
        )


def _check_nothing_given(arguments: dict[str, Any], by: str, why: str) -> None:
    if given := sorted(name for name, value in arguments.items() if value is not None):
        raise Unsupported(f"{by} takes no {', '.join(given)}: {why}")

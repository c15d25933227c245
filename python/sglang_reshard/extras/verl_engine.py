"""Drives one engine from all trainer ranks in step (SPMD), with the interface of SGLang's former VerlEngine.

    engine = VerlEngine(device_mesh_cpu=mesh["tp"], tp_size=16, model_path=...)    # on every trainer rank
    report = engine.update_weights_from_tensor(model.named_parameters())           # DTensors stay local
    out = engine.generate(input_ids=[[1, 2, 3]], sampling_params={"max_new_tokens": 8})
    engine.shutdown()

The engine runs on the first trainer rank of every node; the other ranks only participate. To use a running server
instead, pass other constructor arguments:

    engine = VerlEngine(device_mesh_cpu=mesh["tp"], backend="server", url="http://gpu7:30000", admin_api_key=...)

All methods are collective and return their result on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch.distributed.device_mesh import DeviceMesh

from sglang_reshard.api.remote_engine import RemoteEngine
from sglang_reshard.api.weight_sender import WeightSender, connect_server
from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.nearest import check_one_of
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.patches.embedded_engine import EmbeddedEngine
from sglang_reshard.patches.launch import require_main_guard
from sglang_reshard.protocol.messages import PauseMode
from sglang_reshard.protocol.session import LOOPBACK, is_loopback
from sglang_reshard.protocol.weights_info import WeightsInfo
from sglang_reshard.sources import NamedTensors
from sglang_reshard.trainer.collectives import first_rank_address, on_first_rank
from sglang_reshard.trainer.options import SenderOptions, UpdateOptions

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine
    from typing_extensions import Unpack

    from sglang_reshard.api.given import UpdateGiven
    from sglang_reshard.extras.lora_adapters import LoraAdapters


class VerlEngine:
    """An SGLang engine that receives its weights from the trainer ranks of `device_mesh_cpu`.

    device_mesh_cpu  1-D mesh of the trainer ranks, with a CPU (gloo) backend
    nnodes           nodes that the engine spans; the mesh's ranks are spread evenly over them
    backend          "engine": started here. "server": one that is running at `url`
    url, api_key, admin_api_key   of the server, see `RemoteEngine`, also for their defaults
    tp_size          the engine's tensor parallel size; by default the mesh's size
    interface        address of the first rank's host at which engine ranks connect to it; by default loopback on one
                     node, on several the one at which other nodes find MASTER_ADDR, and for a server that of the
                     interface towards it
    options, given   see `SenderOptions`; other named arguments are passed to `sglang.Engine`
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
        interface: str | None = None,
        options: SenderOptions | None = None,
        **given: Any,
    ) -> None:
        of_sender, server_args = SenderOptions.split(given)
        options = SenderOptions.of(options, of_sender)
        check_one_of("backend", backend, ("engine", "server"))
        if device_mesh_cpu.ndim != 1:
            raise Unsupported(
                f"device_mesh_cpu has {device_mesh_cpu.ndim} dimensions; pass a mesh of one dimension, mesh['tp'] for "
                "example"
            )
        self._group = device_mesh_cpu.get_group()
        self._rank = device_mesh_cpu.get_local_rank()
        self._local: EmbeddedEngine | RemoteEngine | None = None
        self._paused = False
        if backend == "engine":
            of_server = {"url": url, "api_key": api_key, "admin_api_key": admin_api_key}
            _check_not_given(of_server, "backend='engine'", "they belong to a server; pass backend='server' to use one")
            require_main_guard()
            interface = interface or (LOOPBACK if nnodes == 1 else first_rank_address(self._group))
            if device_mesh_cpu.size() % nnodes:
                raise Unsupported(
                    f"{device_mesh_cpu.size()} trainer ranks cannot be divided evenly among {nnodes} nodes"
                )
            if nnodes > 1 and is_loopback(interface):
                raise Unsupported(
                    f"nnodes={nnodes}, but the session listens on {interface}, which other nodes cannot reach; pass "
                    "interface=, the first node's address in the private network"
                )
            ranks_per_node = device_mesh_cpu.size() // nnodes
            arguments = {
                "tp_size": tp_size or device_mesh_cpu.size(),
                "nnodes": nnodes,
                "node_rank": self._rank // ranks_per_node,
                **server_args,
            }
            self._start(arguments, ranks_per_node)
        else:
            of_engine = {**server_args, "tp_size": tp_size, "nnodes": None if nnodes == 1 else nnodes}
            _check_not_given(
                of_engine, "backend='server'", "they are options of the engine, and a server gets them at its start"
            )
            self._local, reached = connect_server(
                self._group, url, api_key=api_key, admin_api_key=admin_api_key, timeout_s=options.timeout_s
            )
            interface = interface or reached
        self._sender = WeightSender.over(
            self._group,
            self._first.update_weights_distributed if self._rank == 0 else None,
            interface=interface,
            options=options,
        )

    def update_weights_from_tensor(
        self,
        named_tensors: NamedTensors | torch.nn.Module,
        load_format: str | None = None,
        options: UpdateOptions | None = None,
        **given: Unpack[UpdateGiven],
    ) -> UpdateReport:
        """Updates the engine to these weights. Every rank passes its own shards.

        named_tensors  all of the model's, under their checkpoint names: DTensors, or tensors that every rank holds;
                       or the module itself
        options, given   weight_version and the other options of `WeightSender.update`
        """
        if load_format is not None:
            raise Unsupported(
                f"load_format={load_format!r} is not supported, because the engine's own loader is used; omit it"
            )
        return self._sender.update(named_tensors, options, **given)

    def lora_adapter(self, name: str, config: str, base: NamedTensors | torch.nn.Module | None = None) -> WeightSender:
        """Returns a WeightSender for one LoRA adapter of the engine, see `WeightSender.lora_adapter`."""
        return self._sender.lora_adapter(name, config, base)

    def lora_adapters(self) -> LoraAdapters:
        """Returns what updates any number of the engine's LoRA adapters, see `WeightSender.lora_adapters`."""
        return self._sender.lora_adapters()

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
        """Calls SGLang's `Engine.generate` on the first rank; tensors in its output become lists.

        Raises TornWeights if the weights are torn, WeightsMissing before the first update of an engine that started on
        dummy weights, and Mismatch while paused. The other ranks wait for the output; the group's own timeout bounds
        that.
        """
        if self._paused:
            raise Mismatch("generation is paused; call continue_generation first")
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
        """Frees the memory of "weights", of "kv_cache", or of all. The next update restores the weights."""
        self._on_first_rank(lambda: self._first.release_memory_occupation(tags))

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        self._on_first_rank(lambda: self._first.resume_memory_occupation(tags))

    def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Pauses requests of other clients, so that an update does not wait for them; see `RemoteEngine`."""
        check_one_of("mode", mode, get_args(PauseMode))
        self._on_first_rank(lambda: self._first.pause_generation(mode))
        self._paused = True

    def continue_generation(self) -> None:
        self._on_first_rank(lambda: self._first.continue_generation())
        self._paused = False

    def flush_cache(self) -> None:
        """Flushes the prefix cache. Raises EngineRefused while requests run."""
        self._on_first_rank(lambda: self._first.flush_cache())

    def weights_info(self) -> WeightsInfo:
        """Describes the live weights, and the update that brought them."""
        info: WeightsInfo = self._on_first_rank(lambda: self._first.weights_info(), WeightsInfo)
        return info

    def shutdown(self) -> None:
        """Ends the session, and the processes of an engine that was started here.

        A server keeps running with its weights.
        """
        self._sender.close()
        if self._local is not None:
            self._local.close()
            self._local = None

    @property
    def engine(self) -> Engine | None:
        """SGLang's `Engine` on the first rank of every node; None on other ranks, and for a server."""
        return self._local.engine if isinstance(self._local, EmbeddedEngine) else None

    @property
    def _first(self) -> EmbeddedEngine | RemoteEngine:
        assert self._local is not None, "must be called on the first rank only"
        return self._local

    def _start(self, arguments: dict[str, Any], ranks_per_node: int) -> None:
        if self._rank % ranks_per_node == 0 and self._rank != 0:
            self._local = EmbeddedEngine.start(arguments)

        def start_first() -> None:
            self._local = EmbeddedEngine.start_checked(arguments)

        self._on_first_rank(start_first)

    def _on_first_rank(self, call: Callable[[], Any], kind: Any = Any) -> Any:
        return on_first_rank(call, self._group, kind)


def _check_not_given(arguments: dict[str, Any], option: str, why: str) -> None:
    if given := sorted(name for name, value in arguments.items() if value is not None):
        raise Unsupported(f"{option} does not accept {', '.join(given)}: {why}")

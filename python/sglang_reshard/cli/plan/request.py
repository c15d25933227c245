"""The request: model, trainer and engine sizes, and the layout that these mean."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from sglang_reshard.cli.layouts import Source, StagedTarget
from sglang_reshard.errors import Mismatch
from sglang_reshard.gpu.rank_info import RankGpuInfo
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.layout.source_layout import Mesh, Placement, SourceLayout, SourceTensor, in_order_of_strides
from sglang_reshard.protocol.validation import check_transport
from sglang_reshard.sources.state import LayoutTables

_VOCABULARY_PADDING = 64  # SGLang rounds the vocabulary up to this before it divides it
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_KV_HEADS, _VOCABULARY = "num_key_value_heads", "vocab_size"
# Tensor parallelism as trainers have it: what leads into a block's middle is split by rows, what leads out of it by
# columns, and norms, routers and biases of the latter are whole on every rank.
_LEADS_OUT = re.compile(r"(^|\.)(o_proj|out_proj|wo|down_proj|w2|c_proj|dense|dense_4h_to_h|fc2)\.")
_WHOLE = re.compile(r"(^|\.)(gate|router|\w*norm\w*|ln_\w+)\.|e_score_correction_bias")


class PlanRequest(msgspec.Struct, frozen=True):
    """The inputs of a plan.

    model            name shown in the result
    folder           folder with config.json, and with safetensors if there are any
    layers           number of layers to plan for; 0 for all
    device           the engine's device, "cuda" or "cpu"
    ranks_per_host   ranks of either side on one host
    colocated        whether engine ranks are on the trainer ranks' GPUs, from the first on
    links            bytes per second within a host and between hosts; 0 for the cost model's defaults
    ignore           fnmatch patterns of names of tensors that the trainer leaves out
    """

    model: str
    folder: str
    source: Source
    target: StagedTarget
    layers: int = 0
    device: str = "cuda"
    ranks_per_host: int = 8
    colocated: bool = False
    links: tuple[float, float] = (0.0, 0.0)
    transport: str = "auto"
    bucket_bytes: int = 64 << 20
    ignore: tuple[str, ...] = ()
    processes: int = 2
    deadline_seconds: float = 1800.0

    def __post_init__(self) -> None:
        check_transport(self.transport)

    @property
    def trainer_hosts(self) -> tuple[str, ...]:
        """The host of each trainer rank."""
        name = "host" if self.colocated else "trainer host"
        return tuple(f"{name} {rank // self.ranks_per_host}" for rank in range(self.source.ranks))

    @property
    def engine_hosts(self) -> tuple[str, ...]:
        """The host of each engine rank."""
        name = "host" if self.colocated else "engine host"
        return tuple(f"{name} {rank // self.ranks_per_host}" for rank in range(self.target.ranks))

    @property
    def trainer_devices(self) -> tuple[RankGpuInfo, ...]:
        """The GPU of each trainer rank."""
        return self._devices(self.trainer_hosts)

    @property
    def engine_devices(self) -> tuple[RankGpuInfo, ...]:
        """The GPU of each engine rank: colocated, those of the first trainer ranks."""
        return self._devices(self.engine_hosts)

    def _devices(self, hosts: Sequence[str]) -> tuple[RankGpuInfo, ...]:
        if self.device != "cuda":
            return (RankGpuInfo(),) * len(hosts)
        return tuple(RankGpuInfo(f"GPU {rank % self.ranks_per_host} of {host}") for rank, host in enumerate(hosts))


def check_stages(config: Mapping[str, Any], target: StagedTarget, model: str) -> None:
    """Raises Mismatch if the model has fewer layers than the engine has pipeline stages."""
    layers = _text_config(config).get("num_hidden_layers")
    if isinstance(layers, int) and target.pp > layers:
        raise Mismatch(
            f"--target {target}: {model} has {layers} layers, and pp={target.pp} needs a layer for each pipeline stage"
        )


def start_failure(error: BaseException, config: Mapping[str, Any], target: StagedTarget, model: str) -> str:
    """Returns what SGLang failed with, or the assertion if it has no message, and the sizes that may be the cause."""
    text = f"{type(error).__name__}: {error}" if str(error) else f"{type(error).__name__} of `{_statement(error)}`"
    reasons = tuple(indivisible(config, target)) if isinstance(error, (AssertionError, ValueError)) else ()
    return f"{text}; {model} has {', and '.join(reasons)}" if reasons else text


def indivisible(config: Mapping[str, Any], target: StagedTarget) -> Iterator[str]:
    """Yields each size of the model that is not divisible by the engine's, as "num_attention_heads=32, which ..."."""
    sizes, tp = _text_config(config), f"tp={target.tp}"
    attention, experts = target.tp // target.dp, target.tp // target.ep
    of_attention = tp if target.dp == 1 else f"{tp} over dp={target.dp}, which is {attention}"
    for names, divisor, by in (
        (_HEADS, attention, of_attention),
        ((_KV_HEADS,), attention, of_attention),
        ((_VOCABULARY,), target.tp, tp),
        (("intermediate_size",), target.tp, tp),
        (_EXPERTS, target.ep, f"ep={target.ep}"),
        (("moe_intermediate_size",), experts, f"tp/ep={experts}"),
    ):
        for name in names:
            size = sizes.get(name)
            if not isinstance(size, int) or size <= 0:
                continue
            divided, shown = size, f"{name}={size}"
            if name == _VOCABULARY:
                divided = -(-size // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
                shown += f", padded to {divided}"
            if divided % divisor and name != _KV_HEADS:
                yield f"{shown}, which is not divisible by {by}"
            elif divided % divisor and divisor % divided:
                yield f"{shown}, which neither divides {by} nor is divisible by it"


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _statement(error: BaseException) -> str:
    """Returns the statement that raised the error, with its file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "?"
    last = frames[-1]
    statement = linecache.getline(last.filename, last.lineno or 0).strip()
    return f"{statement}` at `{last.filename.rpartition('/')[2]}:{last.lineno}"


def layout_of(specs: Sequence[TensorSpec], source: Source) -> SourceLayout:
    """All tensors, as trainer ranks of such a mesh hold them.

    FSDP2 splits dimension 0, after tensor parallelism has; a tensor without dimensions is whole on every rank.
    """
    shape = tuple(n for n in (source.replicas, source.fsdp, source.tp) if n > 1) or (1,)
    mesh, tables = Mesh(shape, tuple(range(source.ranks))), LayoutTables()
    shardings = ((spec, in_order_of_strides(mesh, _placements(spec, source))) for spec in specs)
    return tables.layout(
        source.ranks,
        [SourceTensor(of.name, of.shape, of.dtype, *tables.indices(sharding)) for of, sharding in shardings],
    )


def _placements(spec: TensorSpec, source: Source) -> tuple[Placement, ...]:
    tensor_dim = _tensor_parallel_dim(spec)
    found = [Placement()] if source.replicas > 1 else []
    if source.fsdp > 1:
        # torch's _StridedShard: the mesh dimension to the right has split this dimension first.
        after = source.tp if tensor_dim == 0 else 1
        found.append(Placement(0, after) if spec.shape else Placement())
    if source.tp > 1:
        found.append(Placement(tensor_dim))
    return tuple(found) or (Placement(),)


def _tensor_parallel_dim(spec: TensorSpec) -> int:
    """The dimension that tensor parallelism splits; -1 for none."""
    if not spec.shape or _WHOLE.search(spec.name):
        return -1
    if _LEADS_OUT.search(spec.name):
        return len(spec.shape) - 1 if len(spec.shape) > 1 else -1
    return 0 if len(spec.shape) > 1 or spec.name.endswith(".bias") else -1

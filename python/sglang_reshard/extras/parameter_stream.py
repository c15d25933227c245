"""Receives parameters that a trainer broadcasts one by one, and updates an engine with complete versions of them.

    stream = ParameterStream(engine.update_weights_distributed)         # in one process of the engine's host
    stream.init_broadcast_group("10.0.0.1", 29500, rank_offset=1, world_size=2, group_name="weights", backend="nccl")
    for name, dtype, shape in ...:                                      # as the trainer broadcasts them from its rank 0
        stream.update_broadcast(1, name, dtype, shape)
    stream.commit(1)

The engine has one member in the group, for any TP size. It keeps every parameter whole. It then acts as a trainer of
one rank: engine ranks read their parts from its memory, and have all of a version or none. Stock SGLang's
`update_weights_from_distributed`, with every engine rank as a member, is not changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.errors import Mismatch
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.protocol.session import LOOPBACK, Session
from sglang_reshard.shown_names import some_names
from sglang_reshard.trainer.coordinator import Send
from sglang_reshard.trainer.options import SenderOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sglang_reshard.api.given import SenderGiven, UnversionedUpdateGiven

Shape = Sequence[int]
_TRAINER = 0  # the rank that broadcasts


class ParameterStream:
    """One engine's end. Not for use from several threads at once.

    nbytes  of the parameters that it keeps
    """

    def __init__(
        self,
        send: Send,
        *,
        device: torch.device | None = None,
        interface: str = LOOPBACK,
        options: SenderOptions | None = None,
        **given: Unpack[SenderGiven],
    ) -> None:
        """`send` sends a request to the engine and returns its answer: `Engine.update_weights_distributed`, or
        `RemoteEngine`'s.

        device     of the parameters that it keeps; by default the host's memory. NCCL needs a GPU
        interface  address of this host at which engine ranks reach it
        options, given   see `SenderOptions`
        """
        chosen = SenderOptions.of(options, given)
        self._device, self._timeout_s = device or torch.device("cpu"), chosen.timeout_s
        session = Session.host(interface, chosen.timeout_s)
        self._sender = WeightSender.within(session, trainer_rank=0, global_ranks=(0,), send=send, options=chosen)
        self._group: dist.ProcessGroup | None = None
        self._known: dict[str, torch.Tensor] = {}
        self._version: str | None = None  # that is being received
        self._received: set[str] = set()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._known.values())

    def init_broadcast_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weights",
        backend: str = "nccl",
    ) -> None:
        """Joins the trainer's group, as `init_custom_process_group` of SGLang makes it. Collective over the group.

        rank_offset  this engine's rank in the group: 1 for the first engine, because the trainer has 0
        world_size   members of the group: the trainer, and one for each engine
        """
        from sglang_reshard.patches import custom_group

        self._group = custom_group.join(
            master_address, master_port, rank_offset, world_size, group_name, backend, self._timeout_s
        )

    def update_broadcast(self, version: object, name: str, dtype: torch.dtype | str, shape: Shape) -> None:
        """Receives one parameter, which the trainer broadcasts now. The engine does not have it before `commit`."""
        self.update_broadcast_bucket(version, [name], [dtype], [shape])

    def update_broadcast_bucket(
        self, version: object, names: Sequence[str], dtypes: Sequence[torch.dtype | str], shapes: Sequence[Shape]
    ) -> None:
        """Receives several parameters, which the trainer broadcasts as one tensor of bytes, see `buckets`.

        Parameters of another version begin that version and discard uncommitted ones. Raises RuntimeError if the
        broadcast fails; broadcast these parameters again.
        """
        if self._group is None:
            raise Mismatch("call init_broadcast_group first")
        if self._version != str(version):
            self._version, self._received = str(version), set()
        tensors = [
            self._parameter(name, _dtype(dtype), tuple(shape))
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
        ]
        self._received -= set(names)
        if len(tensors) == 1:
            dist.broadcast(tensors[0], _TRAINER, self._group)
        else:
            sizes = [tensor.nbytes for tensor in tensors]
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            dist.broadcast(flat, _TRAINER, self._group)
            for tensor, part in zip(tensors, flat.split(sizes), strict=True):
                tensor.view(-1).view(torch.uint8).copy_(part)
        self._received |= set(names)

    def commit(self, version: object, **options: Unpack[UnversionedUpdateGiven]) -> UpdateReport:
        """Updates the engine to a version whose parameters have all arrived; its weight_version is `version`.

        options  of `WeightSender.update`

        Raises Mismatch, naming them, if parameters of the version before have not arrived, and the errors of the
        update. In this case the engine keeps its weights, unless they are torn.
        """
        missing = [name for name in self._known if name not in self._received]
        if self._version != str(version) or missing:
            shown = some_names(missing) or "no parameter at all"
            raise Mismatch(
                f"version {version} is incomplete: {len(missing)} parameters have not arrived, {shown}. Send them "
                "before committing"
            )
        report = self._sender.update(list(self._known.items()), weight_version=str(version), **options)
        self._version, self._received = None, set()
        return report

    def close(self) -> None:
        """Leaves the group, and ends the session with the engine."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
        self._sender.close()

    def _parameter(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        known = self._known.get(name)
        if known is None or known.dtype != dtype or known.shape != shape:
            known = self._known[name] = torch.empty(shape, dtype=dtype, device=self._device)
        return known


def buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int, *, by_module: bool = False
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yields groups of parameters that a trainer may broadcast as one: at most `bucket_bytes`, or one larger parameter.

    by_module  a bucket has all parameters of one module ("model.layers.3.mlp"), and no others
    """
    bucket: list[tuple[str, torch.Tensor]] = []
    filled, module = 0, ""
    for name, tensor in named_tensors:
        of = ".".join(name.split(".")[:-2]) if by_module else ""
        if bucket and (filled + tensor.nbytes > bucket_bytes or of != module):
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor))
        filled, module = filled + tensor.nbytes, of
    if bucket:
        yield bucket


def packed(bucket: Sequence[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """Returns the tensor that a trainer broadcasts for a bucket: the parameter, or the bytes of several."""
    if len(bucket) == 1:
        return bucket[0][1].detach().contiguous()
    return torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in bucket])


def _dtype(given: torch.dtype | str) -> torch.dtype:
    found = given if isinstance(given, torch.dtype) else getattr(torch, given.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise Mismatch(f"{given!r} is not a torch dtype")
    return found

"""Moves parameters between two layouts of one torch.distributed world, shard to shard.

    plan = ReshardPlan.make(actor.named_parameters(), generation.named_parameters())   # on every rank
    for step in range(steps):
        train(actor)
        plan.run()                                                                      # generation has the weights

Nothing is gathered. Every rank is sent exactly the elements that its target shards have and its own source shards lack,
in messages of bounded size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from sglang_reshard import tasks
from sglang_reshard.errors import Mismatch, ReshardError
from sglang_reshard.extras.realloc.rank_plan import (
    Demand,
    Described,
    Given,
    PreparedMove,
    RankPlan,
    check_all_listed,
    sent_matrix,
)
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.layout.decoders import unpack_blob
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.layout.union import union
from sglang_reshard.protocol.messages import DEFAULT_BUCKET_BYTES
from sglang_reshard.routes.p2p.messages import SendRequest, round_bytes
from sglang_reshard.trainer.collectives import (
    broadcast_message,
    gather,
    gathering,
    require_cpu_backend,
    translated_errors,
)


def reshard(
    source: Given,
    target: Given,
    group: dist.ProcessGroup | None = None,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    strict: bool = True,
    drop_source: bool = False,
) -> None:
    """Copies the source's values into the target's tensors, in place, once. Collective over `group`.

    Takes the arguments of `ReshardPlan.make` and `ReshardPlan.run`, and raises their errors. To move again and again,
    make a plan.
    """
    ReshardPlan.make(source, target, group, bucket_bytes=bucket_bytes, strict=strict).run(drop_source=drop_source)


class ReshardPlan:
    """One rank's part of a move from one layout to another, made by `make` and run any number of times.

    It keeps both sides' tensors and its buckets alive. Values may change between runs; memory must not.

    received_bytes  that other ranks send to this one in a run, in the source's dtypes: exactly the elements it lacks
    sent_bytes      that this rank sends
    copied_bytes    that it copies from its own source shards; nothing where source and target are the same memory
    extra_bytes     of its buckets: at most two of `bucket_bytes` to send from and two to receive in
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, prepared: PreparedMove) -> None:
        """Use `make`."""
        self._group, self._rank, self._device = group, dist.get_rank(group), device
        self._refused = ""  # why it cannot be run now
        self._mover, self._memory, self._versions, *told = prepared
        self.received_bytes, self.sent_bytes, self.copied_bytes, self.extra_bytes = told

    @classmethod
    def make(
        cls,
        source: Given,
        target: Given,
        group: dist.ProcessGroup | None = None,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        strict: bool = True,
    ) -> ReshardPlan:
        """Plans the move and allocates its buckets. Only metadata is exchanged. Collective over `group`.

        source, target  see `sglang_reshard.sources.describe`: a module, or (name, tensor[, sharding]); None or
                        empty on a rank that has nothing of that side. Ranks may list different tensors, as pipeline
                        stages do. A plain tensor is whole on every rank that lists it. "Trainer rank" of a sharding is
                        the rank within `group`
        group           all ranks that have tensors of either side, by default all ranks. It needs a CPU backend; where
                        it also has NCCL, tensors on GPUs are sent by it, otherwise through host memory
        bucket_bytes    size of a bucket
        strict          both sides must have the same names; otherwise those of one side alone are left as they are

        A tensor has the same name and shape on both sides. Where dtypes differ, the source's is sent, and cast when it
        is written. On the source side, ranks that list a tensor hold equal or disjoint boxes of it, and together all of
        it; target ranks need not agree.

        Raises Mismatch for names and shapes that differ, for targets that share memory (names that are one tensor in
        the source may be one in the target), and for a target in memory of the source that is not the same elements;
        Unsupported for tensors that cannot be sent or cast; DeadlineExceeded if a rank does not come within the group's
        timeout. Every rank raises the same error, which names tensor and rank, and nothing is written.
        """
        group = group or dist.group.WORLD
        assert group is not None, "init_process_group has not been called"
        require_cpu_backend(group)
        rank = dist.get_rank(group)
        own = RankPlan(group, source, target, {"bucket_bytes": bucket_bytes, "strict": strict})
        told = gather(own.describe, Described, group)
        for peer, other in enumerate(told):
            if other.options != told[0].options:  # they would cut different messages
                raise Mismatch(
                    f"trainer rank {peer} has the options {other.options}, but trainer rank 0 has {told[0].options}; "
                    "pass the same options on all ranks"
                )
        layout = union_of_layouts(own.packed, [other.layout for other in told], group)
        if not layout.tensors:
            raise Mismatch("no trainer rank passed any source tensors")
        demands = gather(lambda: own.demand(layout, told), Demand, group)
        if strict:
            check_all_listed(own.index, demands)
        incoming = {peer: other.request_bytes.get(rank, 0) for peer, other in enumerate(demands)}
        requests = {
            peer: unpack_blob(blob, SendRequest, what=f"the request of trainer rank {peer}")
            for peer, blob in enumerate(exchange_blobs(own.packed_requests, incoming, group))
            if blob
        }
        per_round = round_bytes(sent_matrix(demands), bucket_bytes)
        own_device = own.device if any(other.gpu for other in told) else torch.device("cpu")
        nccl = own_device.type != "cpu" and "cuda:nccl" in dist.get_backend_config(group)
        device = own_device if nccl else torch.device("cpu")
        with gathering(type(None), group):
            prepared = own.prepare(requests, per_round, device)
        if nccl:  # it connects all ranks when the group is first used, and ranks without messages would be missing
            with translated_errors(group):
                dist.all_reduce(torch.zeros(1, device=device), group=group)
        return cls(group, own_device, prepared)

    def run(self, *, drop_source: bool = False) -> None:
        """Copies the source's present values into the target's tensors, in place. Collective.

        drop_source  afterwards the storage of every source tensor is resized to 0 bytes, unless the target uses it. The
                     tensors keep their shapes and have no memory; this plan cannot be run again

        For autograd it is a write to each tensor of the target, like `copy_`: a backward through older values raises an
        error. On GPUs it returns when all is enqueued on the current stream, as torch's collectives do, and
        `torch.cuda.set_device` must have chosen each rank's GPU.

        Raises Mismatch if memory of either side was freed or has moved since the plan was made; in this case nothing is
        written. Raises DeadlineExceeded if a rank fails or does not come within the group's timeout: the target is then
        only partly written, and the plan cannot be run again.
        """
        raise_together(self._problem(drop_source), self._group)
        self._run(drop_source)

    def start(self, *, drop_source: bool = False) -> RunningReshard:
        """Runs the plan in a thread, while the caller computes: a reload that overlaps them. Collective.

            moving = plan.start()   # from host memory into the layout for generation, for example
            score(batch)
            moving.wait()           # the target has the weights

        On GPUs it waits for all earlier work on the plan's GPU, and uses a separate stream. Until `wait` the source
        must not change, the target must not be used, and no other collective may use `group`: give the plan a separate
        group. Arguments and errors are those of `run`; `wait` raises errors of the thread.
        """
        raise_together(self._problem(drop_source), self._group)
        self._refused = "the plan is running; call wait on the handle that start returned"

        def move() -> None:
            with runtime().own_stream(self._device):
                self._run(drop_source)

        return RunningReshard(move)

    def _run(self, drop_source: bool) -> None:
        try:
            self._mover.run()
        except BaseException:
            self._refused = "an earlier run of the plan failed; make a new plan over a new process group"
            raise
        finally:
            self._versions.increase()
        self._refused = "the plan's source was dropped; make a new plan" if drop_source else ""
        if drop_source:
            self._memory.drop_source()

    def _problem(self, drop_source: bool) -> ReshardError | None:
        if self._refused:
            return Mismatch(f"trainer rank {self._rank}: {self._refused}")
        return self._memory.problem(drop=drop_source)


class RunningReshard:
    """A move that `ReshardPlan.start` has begun."""

    def __init__(self, move: Callable[[], None]) -> None:
        self._done = tasks.start("move", move, daemon=False)

    def is_completed(self) -> bool:
        """Returns whether the move has ended, or failed, on this rank."""
        return self._done.done()

    def wait(self) -> None:
        """Waits until this rank has all its elements. Raises the errors of `ReshardPlan.run`."""
        self._done.result()


def raise_together(problem: ReshardError | None, group: dist.ProcessGroup) -> None:
    """Raises the first rank's problem on all ranks, if any rank has one. One all-reduce of a number if none has."""
    having = torch.tensor([problem is not None], dtype=torch.int32)
    with translated_errors(group):
        dist.all_reduce(having, group=group)

    def fail() -> None:
        if problem is not None:
            raise problem

    if int(having):
        gather(fail, type(None), group)


def union_of_layouts(packed: bytes, digests: Sequence[str], group: dist.ProcessGroup) -> SourceLayout:
    """Returns the layout of all that ranks list.

    packed   this rank's layout, by `pack_blob`
    digests  content hash of each rank's layout. Each distinct layout is broadcast once

    Raises as `union` does.
    """
    own, layouts = dist.get_rank(group), []
    distinct = list(dict.fromkeys(digests))
    for digest in distinct:
        root = digests.index(digest)
        data = broadcast_message(packed if own == root else None, bytes, group, root)
        layouts.append(unpack_blob(data, SourceLayout, digest, what="the source's layout"))
    return union(layouts, [distinct.index(digest) for digest in digests])


def exchange_blobs(outgoing: Mapping[int, bytes], incoming: Mapping[int, int], group: dist.ProcessGroup) -> list[bytes]:
    """Gives every rank what the others have for it. Returns what each rank has for this one, in rank order.

    outgoing  rank -> the bytes for it
    incoming  rank -> the number of bytes that it has for this one
    """
    ranks = range(dist.get_world_size(group))
    data = b"".join(outgoing.get(rank, b"") for rank in ranks)
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    sizes = [incoming.get(rank, 0) for rank in ranks]
    received = torch.empty(sum(sizes), dtype=torch.uint8)
    with translated_errors(group):
        dist.all_to_all_single(received, sent, sizes, [len(outgoing.get(rank, b"")) for rank in ranks], group=group)
    return [part.numpy().tobytes() for part in received.split(sizes)]

"""Lets engine ranks load a snapshot as the update of a session that this process hosts, in place of a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sglang_reshard.extras.snapshots.source import SnapshotSource
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, LoadSnapshotReq
from sglang_reshard.protocol.session import LOOPBACK, Session
from sglang_reshard.protocol.validation import check_request
from sglang_reshard.routes.disk.messages import put_files
from sglang_reshard.version import PROTOCOL, __version__

_UPDATE = 1  # the session's only one


@contextmanager
def served(
    source: SnapshotSource, asked: LoadSnapshotReq, *, staged: bool, interface: str = LOOPBACK
) -> Iterator[DistributedUpdateWeightsReq]:
    """Yields the request of an update that brings the snapshot. The end of the block ends the update.

    interface  address of this host at which all engine ranks reach it

    Raises Mismatch for options that are invalid.
    """
    session = Session.host(interface, asked.timeout_s)
    try:
        layout = session.put(source.layout)
        put_files(session, source.files)
        request = DistributedUpdateWeightsReq(
            address=session.address,
            update=_UPDATE,
            layout=layout,
            handles=("",),
            trainer_hosts=("",),  # no memory of any host
            weight_version=asked.version,
            transport="disk",
            bucket_bytes=asked.bucket_bytes,
            timeout_s=asked.timeout_s,
            flush_cache=asked.flush_cache,
            abort_all_requests=asked.abort_all_requests,
            ignore=(*asked.ignore, *source.equal),
            apart=source.apart,
            frozen=asked.frozen,
            only=asked.only,
            verify="full",
            staged=staged,
            draft=asked.draft,
            publication=asked.publication,
            package_version=__version__,
            protocol=PROTOCOL,
        )
        check_request(request)
        with session.trainer_channel(_UPDATE, f"the server that loads snapshot {asked.version}"):
            yield request
    finally:
        session.end(1)

"""Where trainer ranks and engine ranks meet: a key-value store that trainer rank 0 keeps for the session.

It carries metadata only (layouts, handles, results); no tensor passes through it. It listens on the
loopback interface unless told otherwise.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from datetime import timedelta
from typing import TypeVar

import msgspec
import torch.distributed as dist

from sglang_reshard.errors import DeadlineExceeded
from sglang_reshard.messages import Failure, TrainerNote, decode, encode, pack_blob, unpack_blob
from sglang_reshard.report import UpdateReport

T = TypeVar("T")


class Address(msgspec.Struct, frozen=True):
    """How to reach a session."""

    session: str
    host: str
    port: int


class _Result(msgspec.Struct, frozen=True, array_like=True):
    report: UpdateReport | None
    failure: Failure | None


class Session:
    """One process's connection to a session's store."""

    def __init__(self, address: Address, store: dist.Store) -> None:
        self.address = address
        self.store = dist.PrefixStore(address.session, store)

    @classmethod
    def host(cls, interface: str = "127.0.0.1", timeout_s: float = 300.0) -> Session:
        """Open a session that listens on `interface` only (an address of this host), on a free port."""
        listener = socket.socket(socket.AF_INET6 if ":" in interface else socket.AF_INET)
        listener.bind((interface, 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            interface,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )
        return cls(Address(secrets.token_hex(16), interface, port), store)

    @classmethod
    def join(cls, address: Address, timeout_s: float = 300.0) -> Session:
        """Connect to a session. Raises DeadlineExceeded when nothing answers."""
        try:
            store = dist.TCPStore(
                address.host,
                address.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )
        except Exception as error:
            raise DeadlineExceeded(
                f"trainer rank 0's session at {address.host}:{address.port} did not answer within "
                f"{timeout_s:.0f} s: {error}"
            ) from error
        return cls(address, store)

    # -- what trainer ranks publish once, until it changes

    def put_layout(self, message: object) -> str:
        digest, blob = pack_blob(message)
        self._set(f"layout/{digest}", blob)
        return digest

    def put_handles(self, trainer_rank: int, message: object) -> str:
        digest, blob = pack_blob(message)
        self._set(f"handles/{trainer_rank}/{digest}", blob)
        return digest

    def get_layout(self, digest: str, kind: type[T], timeout_s: float) -> T:
        return unpack_blob(self._get(f"layout/{digest}", "the source layout", timeout_s), kind)

    def get_handles(self, trainer_rank: int, digest: str, kind: type[T], timeout_s: float) -> T:
        what = f"the memory handles of trainer rank {trainer_rank}"
        return unpack_blob(self._get(f"handles/{trainer_rank}/{digest}", what, timeout_s), kind)

    def forget_handles(self, trainer_rank: int, digest: str) -> None:
        self.store.delete_key(f"handles/{trainer_rank}/{digest}")

    # -- one update

    def announce(self, update: int, trainer_rank: int, note: TrainerNote) -> None:
        self._set(_note_key(update, trainer_rank), encode(note))

    def collect_notes(self, update: int, ranks: int, timeout_s: float) -> list[TrainerNote]:
        """All trainer ranks' notes. Raises DeadlineExceeded naming the ranks that did not announce themselves."""
        keys = [_note_key(update, rank) for rank in range(ranks)]
        try:
            self.store.wait(keys, timedelta(seconds=timeout_s))
        except dist.DistStoreError as error:
            late = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            raise DeadlineExceeded(
                f"update {update}: trainer ranks {late} did not call update within {timeout_s:.0f} s; "
                "every trainer rank must call it, look at their logs"
            ) from error
        return [decode(self.store.get(key), TrainerNote) for key in keys]

    def publish_result(self, update: int, result: UpdateReport | Failure) -> None:
        failure = result if isinstance(result, Failure) else None
        report = result if isinstance(result, UpdateReport) else None
        self._set(f"result/{update}", encode(_Result(report, failure)))

    def await_result(self, update: int, timeout_s: float) -> UpdateReport:
        """Trainer rank 0's result. Raises what rank 0 raised."""
        data = self._get(f"result/{update}", "the result of the update from trainer rank 0", timeout_s)
        result = decode(data, _Result)
        if result.failure is not None:
            raise result.failure.error()
        assert result.report is not None
        return result.report

    def forget_update(self, update: int, ranks: int) -> None:
        """Drop the keys of an update that every rank has finished."""
        for key in [*(_note_key(update, rank) for rank in range(ranks)), f"result/{update}"]:
            self.store.delete_key(key)

    # -- the end

    def leave(self, trainer_rank: int) -> None:
        """Say that this rank has read all that it will read."""
        self._set(f"left/{trainer_rank}", b"")

    def await_leaving(self, ranks: int, timeout_s: float) -> None:
        """Trainer rank 0, whose process keeps the store: stay until the others have left, or the time is up."""
        with contextlib.suppress(dist.DistStoreError):
            self.store.wait([f"left/{rank}" for rank in range(1, ranks)], timedelta(seconds=timeout_s))

    def _set(self, key: str, data: bytes) -> None:
        self.store.set(key, data)  # type: ignore[arg-type]  # takes bytes too, its stub says str only

    def _get(self, key: str, what: str, timeout_s: float) -> bytes:
        try:
            self.store.wait([key], timedelta(seconds=timeout_s))
            return self.store.get(key)
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            raise DeadlineExceeded(f"{what} did not arrive within {timeout_s:.0f} s: {error}") from error


def _note_key(update: int, trainer_rank: int) -> str:
    return f"note/{update}/{trainer_rank}"

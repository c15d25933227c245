"""Where trainer ranks and engine ranks meet: a key-value store that trainer rank 0 keeps for the session.

It carries metadata only (layouts, handles, results); no tensor passes through it. It listens on the
loopback interface unless told otherwise.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

import msgspec
import torch.distributed as dist

from sglang_reshard.errors import DeadlineExceeded
from sglang_reshard.messages import Done, Failure, TrainerNote, Word, decode, encode, pack_blob, unpack_blob
from sglang_reshard.plan.streams import Order

T = TypeVar("T")


class Address(msgspec.Struct, frozen=True):
    """How to reach a session."""

    session: str
    host: str
    port: int


class _Said(msgspec.Struct, frozen=True, array_like=True):
    word: Word


class _Verdict(msgspec.Struct, frozen=True, array_like=True):
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
        if late := self._late(keys, timeout_s):
            raise DeadlineExceeded(
                f"update {update}: trainer ranks {late} did not call update within {timeout_s:.0f} s; "
                "every trainer rank must call it, look at their logs"
            )
        return [decode(self.store.get(key), TrainerNote) for key in keys]

    def say(self, update: int, word: Word) -> None:
        """Put a word to all trainer ranks, after those that were said before."""
        number = self.store.add(_count_key(update), 1) - 1
        self._set(f"word/{update}/{number}", encode(_Said(word)))

    def words(self, update: int, timeout_s: float) -> Iterator[Word]:
        """What is said to trainer ranks in an update, in order; `Done` is the last. `timeout_s` bounds each wait."""
        for number in itertools.count():
            data = self._get(f"word/{update}/{number}", f"the result of update {update} from trainer rank 0", timeout_s)
            word = decode(data, _Said).word
            yield word
            if isinstance(word, Done):
                return

    def forget_update(self, update: int, ranks: int) -> None:
        """Drop the keys of an update that every rank has finished."""
        words = self.store.add(_count_key(update), 0)
        keys = [*(f"word/{update}/{n}" for n in range(words)), _count_key(update)]
        kinds = ["note"] if words <= 1 else ["note", "ready", "mishap"]  # of the others nothing was said
        for key in [*keys, *(f"{kind}/{update}/{rank}" for kind in kinds for rank in range(ranks))]:
            self.store.delete_key(key)

    # -- where trainer ranks send

    def put_order(self, intake: str, engine_rank: int, trainer_rank: int, order: Order) -> None:
        """What an engine rank takes from a trainer rank; `intake` is the digest of all it takes."""
        self._set(_order_key(intake, engine_rank, trainer_rank), pack_blob(order)[1])

    def get_order(self, intake: str, engine_rank: int, trainer_rank: int, timeout_s: float) -> Order:
        what = f"the order of engine rank {engine_rank} for trainer rank {trainer_rank}"
        return unpack_blob(self._get(_order_key(intake, engine_rank, trainer_rank), what, timeout_s), Order)

    def forget_order(self, intake: str, engine_rank: int, trainer_rank: int) -> None:
        self.store.delete_key(_order_key(intake, engine_rank, trainer_rank))

    def ready(self, update: int, trainer_rank: int, failure: Failure | None) -> None:
        """A trainer rank's answer to `Connect`."""
        self._set(f"ready/{update}/{trainer_rank}", encode(_Verdict(failure)))

    def collect_ready(self, update: int, ranks: int, timeout_s: float) -> None:
        """Wait for all trainer ranks' answers. Raises the first failure, or DeadlineExceeded naming who is late."""
        keys = [f"ready/{update}/{rank}" for rank in range(ranks)]
        if late := self._late(keys, timeout_s):
            raise DeadlineExceeded(
                f"trainer ranks {late} were not ready to send within {timeout_s:.0f} s; look at their logs"
            )
        for key in keys:
            if (failure := decode(self.store.get(key), _Verdict).failure) is not None:
                raise failure.error()

    def mishap(self, update: int, trainer_rank: int, failure: Failure) -> None:
        """Say why this trainer rank fails to send, before its peers notice that it does."""
        self._set(f"mishap/{update}/{trainer_rank}", encode(_Verdict(failure)))

    def mishaps(self, update: int, ranks: int) -> list[str]:
        """What trainer ranks said of their failures so far."""
        keys = [f"mishap/{update}/{rank}" for rank in range(ranks)]
        said = [decode(self.store.get(key), _Verdict).failure for key in keys if self.store.check([key])]
        return [failure.message for failure in said if failure is not None]

    # -- the end

    def leave(self, trainer_rank: int) -> None:
        """Say that this rank has read all that it will read."""
        self._set(f"left/{trainer_rank}", b"")

    def await_leaving(self, ranks: int, timeout_s: float) -> None:
        """Trainer rank 0, whose process keeps the store: stay until the others have left, or the time is up."""
        with contextlib.suppress(dist.DistStoreError):
            self.store.wait([f"left/{rank}" for rank in range(1, ranks)], timedelta(seconds=timeout_s))

    def end(self) -> None:
        """Trainer rank 0: say that there will be no more updates."""
        self._set("ended", b"")

    def _late(self, keys: Sequence[str], timeout_s: float) -> list[int]:
        """Which of these keys are not there after `timeout_s`, by index."""
        try:
            self.store.wait(list(keys), timedelta(seconds=timeout_s))
        except dist.DistStoreError:
            return [i for i, key in enumerate(keys) if not self.store.check([key])]
        return []

    def _set(self, key: str, data: bytes) -> None:
        self.store.set(key, data)  # type: ignore[arg-type]  # takes bytes too, its stub says str only

    def _get(self, key: str, what: str, timeout_s: float) -> bytes:
        try:
            self.store.wait([key], timedelta(seconds=timeout_s))
            return self.store.get(key)
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            raise DeadlineExceeded(f"{what} did not arrive within {timeout_s:.0f} s: {error}") from error


def when_ended(address: Address, then: Callable[[], None], timeout_s: float) -> None:
    """Call `then`, in a thread of its own, once a session has ended or trainer rank 0's process has.

    timeout_s  to connect within; who cannot takes the session for ended
    """

    def wait() -> None:
        try:
            store = Session.join(address, timeout_s).store  # of its own: while one waits on a store, others cannot
            while True:
                with contextlib.suppress(dist.DistStoreError):  # an hour has passed
                    store.wait(["ended"], timedelta(hours=1))
                    break
        except (DeadlineExceeded, dist.DistNetworkError):
            pass  # the process that kept the store has gone
        then()

    threading.Thread(target=wait, name="sglang-reshard end of session", daemon=True).start()


def _note_key(update: int, trainer_rank: int) -> str:
    return f"note/{update}/{trainer_rank}"


def _count_key(update: int) -> str:
    return f"words/{update}"


def _order_key(intake: str, engine_rank: int, trainer_rank: int) -> str:
    return f"order/{engine_rank}/{intake}/{trainer_rank}"

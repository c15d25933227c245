"""Receives weights into a plain torch module, in a process without SGLang: a data collector, an evaluator.

    receiver = ModuleReceiver(policy)
    receiver.init(metadata)                  # of the trainer's ModuleSender
    while collecting:
        receiver.poll_and_apply()            # takes new weights if there are any
        rollout(policy)

The receiver decides when weights are applied: they wait until it asks for them. Like an engine rank, it maps the
trainer's shards and copies from them, or receives the elements it lacks.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sglang_reshard.control import ENDED
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.errors import ConnectionLost, Mismatch, ReshardError, TornWeights, Unsupported
from sglang_reshard.extras.request_mail import Mailbox, from_metadata
from sglang_reshard.layout.names import matches_any
from sglang_reshard.memory.overlap import Written, written_once
from sglang_reshard.observability.logs import configure, get_logger
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq
from sglang_reshard.shown_names import some_names
from sglang_reshard.sources.versions import VersionCounters
from sglang_reshard.trace.program import MayStay

logger = get_logger(__name__)
_POLL_S = 1.0  # how long the background thread waits at a time: `stop` waits as long


class ModuleReceiver:
    """One process's end. `model` is any module; names of weights are those of its state dict.

    Names that share one tensor in the module must share one in the trainer, or be ignored in the update. For autograd
    an update is a write to each tensor, like `copy_`.

    version  the `weight_version` of the weights that the module has; None before the first, and after an update that
             was given none
    """

    def __init__(self, model: nn.Module, device: torch.device | None = None, *, strict: bool = True) -> None:
        """Receives weights into the parameters and persistent buffers of `model`, in place.

        device  the one that the model is on; by default that of its first parameter
        strict  whether the names that are sent must be those of the module's state dict, as for `load_state_dict`: an
                update is refused, by name, that lacks one of the module's tensors, or has one that the module lacks.
                False ignores the latter, and leaves the former at the values that they have
        """
        configure()
        if device is None:
            device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.version: str | None = None
        self._strict = strict
        self._model = self._with_loader(model, strict)
        self._receiver = WeightReceiver(TracedModel(self._model, self._model.goes_by), 0, 1, device)
        self._mailbox: Mailbox | None = None
        self._applying, self._waiting = threading.Lock(), threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def init(self, metadata: str, *, timeout_s: float = 300.0) -> None:
        """Connects to the `ModuleSender` whose metadata this is. Its next update includes this receiver.

        May be called again once the sender has ended, or the connection to it: the module keeps its weights until the
        next update. Raises DeadlineExceeded if the sender does not answer, Unauthorized for a wrong key, and Mismatch
        for invalid metadata, or while this receiver is connected.
        """
        address = from_metadata(metadata)
        if self._mailbox is not None:
            if not self._mailbox.is_lost:
                raise Mismatch("init was already called; create another ModuleReceiver, or close this one")
            self.close()
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._mailbox = Mailbox(address, name, timeout_s)

    def poll_and_apply(self, timeout: float | None = 0.0) -> bool:
        """Applies new weights if they are there within `timeout` seconds; None waits for them without a limit.

        Returns True if weights were applied. Returns False at a timeout, for an update that fails before anything is
        written (the trainer gets the error; the module keeps its weights), and when another thread calls `close`.

        Raises TornWeights if weights were written only in part: the module must not be used before the next ones.
        Raises ConnectionLost once the sender has ended, and Mismatch while another thread waits for weights.
        """
        mailbox = self._connected()
        if timeout is not None and math.isnan(timeout):
            raise Mismatch("timeout is not a number of seconds; pass None to wait without a limit")
        if not self._waiting.acquire(blocking=False):
            raise Mismatch(
                "another thread is already waiting for weights, for example the one of start(); call stop() first, or "
                "let that thread apply them"
            )
        try:
            request = self._next_request(mailbox, timeout)
            return request is not None and self._apply(request, mailbox)
        finally:
            self._waiting.release()

    def receive(self, timeout: float | None = None) -> str | None:
        """Waits until weights have been applied. Returns their version, "" for an update that was given none.

        Returns None after `timeout` seconds without weights, or when another thread calls `close`. Without a timeout it
        waits until then, or until the sender ends. After a failed update it keeps waiting; the trainer gets the error.

        Raises the errors of `poll_and_apply`.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        mailbox = self._connected()
        while self._mailbox is mailbox:
            left_s = end - time.monotonic()
            if self.poll_and_apply(None if math.isinf(left_s) else left_s):
                return self.version or ""
            if left_s <= 0:
                break
        return None

    def start(self) -> None:
        """Applies weights in a thread from now on, whenever no block of `reading` runs."""
        self._connected()
        if self._thread is not None and self._thread.is_alive():
            raise Mismatch("start was already called; its thread applies weights until stop is called")
        self._stopped.clear()
        arguments = weakref.ref(self), self._stopped
        self._thread = threading.Thread(target=_apply_all, args=arguments, name="sglang-reshard receiver", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread that `start` started."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @contextlib.contextmanager
    def reading(self) -> Iterator[str | None]:
        """Keeps the weights unchanged inside the block, and returns their version. Raises TornWeights."""
        with self._applying:
            self._check_torn()
            yield self.version

    def close(self) -> None:
        """Leaves the session, and ends a wait of another thread; the trainer's next update excludes this receiver."""
        self.stop()
        mailbox, self._mailbox = self._mailbox, None
        if mailbox is not None:
            mailbox.close()
        # Else the end of the session would drop it in another thread, which the end of this process could interrupt.
        self._receiver.close()

    def _with_loader(self, model: nn.Module, strict: bool) -> StateDictModel:
        """Returns the model with the loader that an update traces."""
        return StateDictModel(model, strict=strict)

    def _connected(self) -> Mailbox:
        if self._mailbox is None:
            raise Mismatch("call init first")
        return self._mailbox

    def _next_request(self, mailbox: Mailbox, timeout: float | None) -> DistributedUpdateWeightsReq | None:
        try:
            return mailbox.request(timeout)
        except ConnectionLost as error:
            raise ConnectionLost(
                f"{error}. The module keeps its weights; call init with the metadata of the trainer's next ModuleSender"
            ) from error

    def _apply(self, request: DistributedUpdateWeightsReq, mailbox: Mailbox) -> bool:
        try:
            with self._applying:
                self._model.loads.go_by(request)
                given = request if self._strict else msgspec.structs.replace(request, ignore=("*",))
                output = self._receiver.update(given)
                if output.success:
                    self.version = request.weight_version
                if output.success or output.torn:
                    self._model.count_write()
        except BaseException as error:  # Ctrl-C: else the trainer would wait until its timeout
            why = f"{type(error).__name__} interrupted the receiver while it applied the weights"
            with contextlib.suppress(ReshardError):
                mailbox.answer(
                    DistributedUpdateWeightsOutput(success=False, message=why, torn=bool(self._receiver.torn))
                )
            raise
        if not output.success:
            logger.warning("an update of this module failed and its weights were not applied: %s", output.message)
        try:
            mailbox.answer(output)
        finally:  # torn weights are an error whether or not the trainer can be told
            self._check_torn()
        return output.success

    def _check_torn(self) -> None:
        if torn := self._receiver.torn:
            raise TornWeights(f"{torn}. The module's weights are torn; repeat the update before using it")


def _apply_all(reference: weakref.ref[ModuleReceiver], stopped: threading.Event) -> None:
    """Applies weights until the receiver stops this thread, or is dropped."""
    try:
        while not stopped.is_set() and (receiver := reference()) is not None:
            with contextlib.suppress(TornWeights):  # `reading` raises it until the next weights have come
                receiver.poll_and_apply(_POLL_S)
            del receiver
    except ConnectionLost as error:
        if ENDED in str(error):  # as it should: no failure
            logger.info("the trainer %s, so no further weights are applied", ENDED)
        else:
            logger.warning("the receiver's thread stopped, so no further weights are applied: %s", error)
    except Exception:
        logger.exception("the receiver's thread failed, so no further weights are applied")


@dataclass
class Loads:
    """Holds the loader's options and results. Attributes of the model itself would be restored after a trace.

    ignored   patterns of names that need not be read: those of the update, and tied ones of the trainer's
    may_stay  says which tensors need not be sent
    written   (name, tensor) of all that it has written to
    """

    ignored: tuple[str, ...] = ()
    may_stay: MayStay = field(default_factory=MayStay)
    written: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    def go_by(self, request: DistributedUpdateWeightsReq) -> None:
        self.ignored, self.may_stay = request.ignore, MayStay(request.frozen, request.only)

    def is_ignored(self, name: str) -> bool:
        return matches_any(name, self.ignored)


class StateDictModel(nn.Module):
    """A module whose state dict the trainer sends: parameters and persistent buffers.

    keeps_unsent  whether parameters and buffers that are not sent keep their values; else they are an error
    """

    reshard_main = "module"  # see `trace.kept`

    def __init__(self, module: nn.Module, *, strict: bool) -> None:
        super().__init__()
        self.module, self.keeps_unsent = module, not strict
        self.loads = Loads()
        self._versions = VersionCounters(())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies the weights into the tensors of their names. Names that the module lacks are left to the caller.

        Of names that are one tensor in the module, all but one have to be tied in the trainer too, or to be ignored.

        Raises Mismatch for a tensor of another shape, for two that share memory and are not tied, and, unless
        `keeps_unsent`, if a tensor of the module is missing among the weights. Raises Unsupported for state that is no
        parameter and no buffer, see `get_extra_state`.
        """
        state = self.module.state_dict(keep_vars=True)
        own = {id(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())}
        given = [(name, tensor) for name, tensor in weights if name in state]
        for name, _ in given:
            if id(state[name]) not in own:
                raise Unsupported(
                    f"{name} is in the module's state dict but is neither a parameter nor a buffer; such state cannot "
                    "be received. Leave it out of the update"
                )
        names = sorted((name for name, _ in given), key=self.loads.is_ignored)
        # A DTensor has no address; the write to it is refused.
        entries = [Written.of(name, state[name]) for name in names if not isinstance(state[name], DTensor)]
        # Of tied names the first that is not ignored.
        once = written_once(entries, lambda _, other: self.loads.is_ignored(other), "", "the receiver's module")
        kept = {entries[n].name for n in once} | {name for name in names if isinstance(state[name], DTensor)}
        self.loads.written = [(name, state[name]) for name, _ in given if name in kept]
        for name, tensor in given:
            if name not in kept:
                continue
            target = state[name]
            if target.shape != tensor.shape:  # `copy_` would broadcast
                raise Mismatch(
                    f"{name} is sent with shape {list(tensor.shape)}, but the module's has shape {list(target.shape)}. "
                    "Build trainer and receiver modules with the same sizes"
                )
            target.data.copy_(tensor)
        self._check_rest(state, own, {id(tensor) for _, tensor in self.loads.written})

    def goes_by(self) -> bytes:
        """Returns what the loader goes by: if it changes, a trace is not used again."""
        return repr((self.loads.ignored, self.loads.may_stay)).encode()

    def count_write(self) -> None:
        """Increases the version counters of the written tensors, as `copy_` would. One call for all of it."""
        if self.loads.written:  # since the loader ran
            self._versions, self.loads.written = VersionCounters(self.loads.written), []
        self._versions.increase()

    def _check_rest(self, state: Mapping[str, Any], own: set[int], written: set[int]) -> None:
        """`own` and `written` are ids of tensors: tied ones have several names, and one of them is sent."""
        unsent = [name for name, value in state.items() if id(value) in own and id(value) not in written]
        extra = [name for name, value in state.items() if id(value) not in own and not _is_empty(value)]
        if self.keeps_unsent:
            if unsent or extra:
                logger.info(
                    "the trainer does not send these, so the module keeps its own: %s", some_names([*unsent, *extra])
                )
            return
        unsent = [name for name in unsent if not self.loads.may_stay(name)]
        if unsent:
            raise Mismatch(
                f"the module has {some_names(unsent)}, which the trainer does not send. Send all parameters and "
                "persistent buffers (pass the module itself to update, or its state_dict), or keep the module's own "
                "values with ModuleReceiver(..., strict=False)"
            )
        if extra:
            raise Unsupported(
                "the module has extra state that is neither a parameter nor a buffer and is not sent: "
                f"{some_names(extra)}. Keep the module's own with ModuleReceiver(..., strict=False)"
            )


def _is_empty(extra_state: Any) -> bool:
    """Modules of some libraries have extra state only in some modes, and nothing in it otherwise."""
    return extra_state.numel() == 0 if isinstance(extra_state, torch.Tensor) else not extra_state

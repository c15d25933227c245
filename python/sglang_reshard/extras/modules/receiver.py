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
from collections.abc import Iterator

import msgspec
import torch
from torch import nn

from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.errors import ConnectionLost, Mismatch, ReshardError, TornWeights
from sglang_reshard.extras.modules.state_dict import StateDictModel
from sglang_reshard.extras.request_mail import Mailbox, from_metadata
from sglang_reshard.observability.logs import configure, get_logger
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq

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
        logger.warning("the receiver's thread stopped, so no further weights are applied: %s", error)
    except Exception:
        logger.exception("the receiver's thread failed, so no further weights are applied")

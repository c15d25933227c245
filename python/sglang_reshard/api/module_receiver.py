"""Receives weights into a plain torch module, in a process without SGLang: a data collector, an evaluator.

    receiver = ModuleReceiver(policy)
    receiver.init(metadata)                  # of the trainer's ModuleSender
    while collecting:
        receiver.poll_and_apply()            # takes new weights if there are any
        rollout(policy)

The receiver decides when: weights wait until it asks for them. It maps the trainer's shards and copies out of them, or
is sent what it lacks, as an engine rank does.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterator

import torch
from torch import nn

from sglang_reshard.api.state_dict_model import StateDictModel
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.errors import ConnectionLost, DeadlineExceeded, Mismatch, TornWeights
from sglang_reshard.observability.logs import configure, get_logger
from sglang_reshard.protocol.request_mail import Mailbox, from_metadata

logger = get_logger(__name__)
_POLL_S = 1.0  # how long the background thread waits at a time: `stop` waits as long


class ModuleReceiver:
    """One process's end. `model` is any module; names of weights are those of its state dict.

    Names that are one tensor in the module must be one in the trainer, or be ignored in the update. To autograd an
    update is a write to each tensor, as by `copy_`.

    version  the `weight_version` of the weights that the module has; None before the first
    """

    def __init__(self, model: nn.Module, device: torch.device | None = None) -> None:
        """`device` is the one that the model is on; by default that of its first parameter."""
        configure()
        if device is None:
            device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.version: str | None = None
        self._model = StateDictModel(model)
        self._receiver = WeightReceiver(self._model, 0, 1, device, self._model.goes_by)
        self._mailbox: Mailbox | None = None
        self._applying = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def init(self, metadata: str, *, timeout_s: float = 300.0) -> None:
        """Connects to the `ModuleSender` whose metadata this is. Its next update includes this receiver.

        Raises DeadlineExceeded if it does not answer, and Unauthorized for a wrong key.
        """
        if self._mailbox is not None:
            raise Mismatch("init was called before; make another ModuleReceiver, or close this one")
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._mailbox = Mailbox(from_metadata(metadata), name, timeout_s)

    def poll_and_apply(self, timeout: float = 0.0) -> bool:
        """Applies new weights if they are there within `timeout` seconds. Returns whether it has applied any.

        Raises TornWeights if they were written only in part: the module must not be used before the next ones. An
        update that fails before anything is written is reported to the trainer; the module keeps the weights it has.
        """
        if self._mailbox is None:
            raise Mismatch("call init first")
        request = self._mailbox.request(timeout)
        if request is None:
            return False
        with self._applying:
            self._model.loads.ignored = request.ignore
            output = self._receiver.update(request)
            if output.success:
                self.version = request.weight_version
            if output.success or output.torn:
                self._model.count_write()
        if not output.success:
            logger.warning("the weights were not applied: %s", output.message)
        try:
            self._mailbox.answer(output)
        finally:  # torn weights are an error whether or not the trainer can be told
            self._check_torn()
        return output.success

    def receive(self, timeout: float = 300.0) -> str | None:
        """Waits for the next weights and applies them. Returns their version. Raises DeadlineExceeded if none come."""
        if not self.poll_and_apply(timeout):
            raise DeadlineExceeded(f"no weights arrived within {timeout:.0f} s; did the trainer call update?")
        return self.version

    def start(self) -> None:
        """Applies weights in a thread from now on, whenever no block of `reading` runs."""
        if self._mailbox is None:
            raise Mismatch("call init first")
        self._stopped.clear()
        self._thread = threading.Thread(target=self._run, name="sglang-reshard receiver", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread that `start` started."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @contextlib.contextmanager
    def reading(self) -> Iterator[str | None]:
        """Keeps the weights as they are inside the block, and returns their version. Raises TornWeights."""
        with self._applying:
            self._check_torn()
            yield self.version

    def close(self) -> None:
        """Leaves; the trainer's next update is without this receiver."""
        self.stop()
        mailbox, self._mailbox = self._mailbox, None
        if mailbox is not None:
            mailbox.close()
        # Else the end of the session would drop it in another thread, which the end of this process could interrupt.
        self._receiver.close()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                with contextlib.suppress(TornWeights):  # `reading` raises it until the next weights have come
                    self.poll_and_apply(_POLL_S)
        except ConnectionLost as error:
            logger.warning("no further weights are applied: %s", error)
        except Exception:
            logger.exception("the receiver's thread has ended: no further weights are applied")

    def _check_torn(self) -> None:
        if torn := self._receiver.torn:
            raise TornWeights(f"{torn}. The module's weights are torn: repeat the update before using it")

"""A warm update by ipc runs few files of ours on the trainer's side, on the engine's and between them."""

import sys
import threading
from pathlib import Path

import torch

import sglang_reshard
from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from support.toy import ToyRank
from support.toy_trainers import State
from support.world import run_world

PACKAGE = Path(sglang_reshard.__file__).parent
WARM_UPDATE = 3
# The patches that a request passes within SGLang come in addition: about a dozen.
MOST_FILES = 44
BY_THE_CLOCK = {"control/sockets.py"}  # looks every second whether a peer is silent, as an update seldom takes one


class Passed:
    """The files of the package whose functions run, in any thread started after this was made."""

    def __init__(self):
        self.files = set()
        self.recording = False
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def _see(self, frame, event, _):
        if self.recording and event == "call":
            self.files.add(frame.f_code.co_filename)

    def of_package(self):
        return sorted(str(Path(f).relative_to(PACKAGE)) for f in self.files if Path(f).is_relative_to(PACKAGE))


def train(trainer):
    passed = Passed()
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30, transport="ipc")
    state = State((2,), "fsdp", torch.float32)
    for version in range(1, WARM_UPDATE + 1):
        state.become(version)
        passed.recording = version == WARM_UPDATE
        sender.update(state.given, weight_version=str(version))
        passed.recording = False
    sender.close()
    return passed.of_package()


def serve(rank, size, requests):
    passed = Passed()
    receiver = WeightReceiver(TracedModel(ToyRank(rank, size, torch.float32)), rank, size, torch.device("cpu"))
    for version, request in enumerate(requests, start=1):
        passed.recording = version == WARM_UPDATE
        output = receiver.update(request)
        passed.recording = False
        requests.answer(output)
    return passed.of_package()


def test_a_warm_update_by_ipc_passes_few_files():
    trainers, engines = run_world(2, 2, train, serve)
    files = sorted({file for ranks in (trainers, engines) for files in ranks for file in files} - BY_THE_CLOCK)
    assert len(files) <= MOST_FILES, "\n".join(files)
    assert "routes/ipc.py" in files, "the transport asked for is not among the files seen"

"""An update by ipc runs few files of ours on the trainer's side, on the engine's and between them.

No warm update runs Python code for each tensor.
"""

import functools
import sys
import threading
from collections import Counter
from operator import and_
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import sglang_reshard
from support.toy import ToyRank
from support.toy_serving import receiver_of
from support.toy_trainers import State
from support.world import run_world

PACKAGE = Path(sglang_reshard.__file__).parent
WARM_UPDATE = 3
SEVERAL = (3, 4, 5)  # warm ones
# The patches that a request passes within SGLang come in addition: about a dozen.
MOST_FILES = {1: 70, WARM_UPDATE: 40}  # by number of the update


class Passed:
    """The files of the package whose functions run, in any thread started after this was made, and the calls of each:
    those of its functions and those that it makes of functions in C. Of several updates, the fewest calls: on a loaded
    host, a wait in some update looks more often.
    """

    def __init__(self, updates):
        self.updates = {update: Counter() for update in updates}
        self.number = 0  # of the update that runs
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def _see(self, frame, event, _):
        if self.number in self.updates and event in ("call", "c_call"):
            self.updates[self.number][frame.f_code.co_filename] += 1

    def of_package(self):
        fewest = functools.reduce(and_, self.updates.values())
        return {
            str(Path(file).relative_to(PACKAGE)): calls
            for file, calls in fewest.items()
            if Path(file).is_relative_to(PACKAGE)
        }


def update(trainer, given, transport, recorded):
    passed = Passed(recorded)
    sender = trainer.sender(transport=transport)
    for version in range(1, max(recorded) + 1):
        passed.number = version
        sender.update(given, weight_version=str(version))
        passed.number = 0
    return passed.of_package()


def receive(model, rank, size, requests, recorded):
    passed = Passed(recorded)
    receiver = receiver_of(model, rank, size)
    for version, request in enumerate(requests, start=1):
        passed.number = version
        output = receiver.update(request)
        passed.number = 0
        requests.answer(output)
    return passed.of_package()


def train(trainer, recorded):
    return update(trainer, State((2,), "fsdp", torch.float32).given, "ipc", recorded)


def serve(rank, size, requests, recorded):
    return receive(ToyRank(rank, size, torch.float32), rank, size, requests, recorded)


@pytest.mark.parametrize("recorded", list(MOST_FILES))
def test_an_update_by_ipc_passes_few_files(recorded):
    trainers, engines = run_world(2, 2, train, serve, (recorded,))
    files = sorted({file for ranks in (trainers, engines) for files in ranks for file in files})
    assert len(files) <= MOST_FILES[recorded], "\n".join(files)
    assert "routes/ipc.py" in files, "the transport asked for is not among the files seen"


class Layers(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(layers))

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, loaded in weights:
            parameters[name].data.copy_(loaded)


def train_layers(trainer, layers, transport):
    mesh = init_device_mesh("cpu", (1,))
    given = [(name, distribute_tensor(p, mesh, [Shard(0)])) for name, p in Layers(layers).named_parameters()]
    return update(trainer, given, transport, SEVERAL)


def serve_layers(rank, size, requests, layers, _transport):
    return receive(Layers(layers), rank, size, requests, SEVERAL)


@pytest.mark.parametrize("transport", ["ipc", "p2p", "broadcast"])
def test_a_warm_update_runs_no_python_for_each_tensor(transport):
    few, many = (run_world(1, 1, train_layers, serve_layers, layers, transport) for layers in (20, 200))
    for side, of_few, of_many in zip(("trainer", "engine"), few, many, strict=True):
        (calls,), (more,) = of_few, of_many
        grown = {file: (calls.get(file, 0), n) for file, n in more.items() if n > calls.get(file, 0) + 40}
        assert not grown, f"{side}: calls in a file, with 40 tensors and with 400"

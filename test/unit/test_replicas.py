"""Engine ranks that take their weights from another engine's, without its trainer. All ranks are threads here."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.control import ControlServer
from sglang_reshard.control.connection import FrameWriter
from sglang_reshard.errors import Aborted
from sglang_reshard.extras.replicas.share import LiveWeights, has_begun, wait_until_shared
from sglang_reshard.extras.request_mail import Mailbox
from sglang_reshard.protocol.messages import ShareWeightsReq
from sglang_reshard.protocol.session import Session
from sglang_reshard.trace.program import Program
from sglang_reshard.version import PROTOCOL, __version__
from support.threads import have_ended
from support.toy import ToyRank, checkpoint
from support.toy_serving import receiver_of

CPU = torch.device("cpu")


class Engine:
    """Engine ranks, a thread each for what they do together."""

    def __init__(self, size, model=ToyRank, dtype=torch.float32):
        self.models = [model(rank, size, dtype) for rank in range(size)]
        self.receivers = [receiver_of(m) for m in self.models]
        self.live = [LiveWeights(receiver, rank, size, CPU) for rank, receiver in enumerate(self.receivers)]
        self.threads = ThreadPoolExecutor(size)

    def update(self, request):
        outputs = list(self.threads.map(lambda receiver: receiver.update(request), self.receivers))
        assert len({output.success for output in outputs}) == 1
        return outputs[0]

    def share(self, request):
        return [live.start(request) for live in self.live]

    def differing(self, version):
        """Names of parameters that a stock load of a version would have left otherwise."""
        return [name for model in self.models for name in model.differing(checkpoint(version))]

    def close(self):
        for receiver in self.receivers:
            receiver.close()
        self.threads.shutdown()


@pytest.fixture
def engines():
    with contextlib.ExitStack() as stack:

        def made(size, **options):
            engine = Engine(size, **options)
            stack.callback(engine.close)
            return engine

        yield made


def train(engine, version, **options):
    session = Session.host()
    sender = WeightSender.within(session, trainer_rank=0, global_ranks=(0,), send=engine.update, timeout_s=30)
    report = sender.update(checkpoint(version).items(), weight_version=str(version), **options)
    sender.close()
    return report


@contextlib.contextmanager
def shared(engine, **options):
    """A mailbox in which the request of the engine that shares arrives; ends once no rank reads any more."""
    server = ControlServer.open()
    request = ShareWeightsReq(
        package_version=__version__, protocol=PROTOCOL, address=server.address, timeout_s=30, **options
    )
    assert [output.message for output in engine.share(request)] == [""] * len(engine.live)
    mailbox = Mailbox(server.address, "puller", 30)
    try:
        yield mailbox
        wait_until_shared(request, len(engine.live))
    finally:
        mailbox.close()
        server.close()
        have_ended("sglang-reshard share")


def pull(engine, source, **options):
    with shared(source, **options) as mailbox:
        output = engine.update(mailbox.request(30))
        mailbox.answer(output)
    return output


@pytest.mark.parametrize("sizes", [(1, 2), (2, 4), (4, 2), (4, 1), (2, 2)], ids=str)
def test_an_engine_of_any_size_takes_the_weights_of_another(engines, sizes):
    source, target = (engines(size) for size in sizes)
    report = train(source, 1, verify="full")
    output = pull(target, source, weight_version="1")
    assert (output.success, output.message) == (True, "")
    assert target.differing(1) == []
    assert output.digest == report.digest != ""
    received = sum(rank.received_bytes for rank in output.ranks)
    assert received == sum(rank.least_bytes for rank in output.ranks)
    assert source.differing(1) == []
    assert [receiver.torn for receiver in source.receivers] == [""] * sizes[0]


def test_weights_in_another_dtype_are_cast(engines):
    source, target = engines(2, dtype=torch.bfloat16), engines(1, dtype=torch.float32)
    train(source, 1)
    assert pull(target, source).success
    stock = ToyRank(0, 1, torch.bfloat16)
    stock.load_weights(checkpoint(1).items())
    assert all(torch.equal(getattr(target.models[0], n), p.float()) for n, p in stock.named_parameters())


def test_an_engine_whose_last_update_failed_while_writing_shares_nothing(engines, monkeypatch):
    source = engines(1)
    train(source, 1)
    monkeypatch.setattr(Program, "run_steps", lambda _: 1 / 0)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        train(source, 2)
    (output,) = source.share(ShareWeightsReq(package_version=__version__, protocol=PROTOCOL))
    assert "not brought by an update" in output.message


def test_parameters_that_were_replaced_are_not_shared(engines):
    source = engines(1)
    train(source, 1)
    source.models[0].norm = torch.nn.Parameter(source.models[0].norm.clone(), requires_grad=False)
    (output,) = source.share(ShareWeightsReq(package_version=__version__, protocol=PROTOCOL))
    assert "were replaced, or experts moved, since" in output.message


def test_memory_is_not_moved_under_a_staged_update(engines):
    source, target = engines(1), engines(1)
    session = Session.host()
    outputs = []

    def stage(request):
        """Asks for the weights before the staged update becomes live, unless they were moved already."""
        (receiver,), (live,) = source.receivers, source.live
        if not request.staged or outputs:
            return source.update(request)
        assert receiver.stage(request).success
        outputs.append(live.start(ShareWeightsReq(package_version=__version__, protocol=PROTOCOL)))
        while receiver.staged() is None:
            time.sleep(0.001)
        outputs.append(live.start(ShareWeightsReq(package_version=__version__, protocol=PROTOCOL)))
        return receiver.commit(request)

    sender = WeightSender.within(session, trainer_rank=0, global_ranks=(0,), send=stage, timeout_s=30)
    sender.update(checkpoint(1).items())
    sender.update(checkpoint(2).items(), staged=True)
    assert [output.success for output in outputs] == [False, False]
    assert all("is receiving an update" in output.message for output in outputs)
    assert pull(target, source).success
    assert target.differing(2) == []
    sender.update(checkpoint(3).items(), staged=True)  # after its memory was moved
    assert source.differing(3) == []
    sender.close()


def test_a_failure_of_the_sharing_engine_reaches_the_other_one(engines, monkeypatch):
    source = engines(1)
    train(source, 1)
    monkeypatch.setattr("sglang_reshard.trainer.publisher.describe", lambda *_, **__: 1 / 0)
    with shared(source) as mailbox, pytest.raises(Aborted, match="ZeroDivisionError"):
        mailbox.request(30)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("transport", ["ipc", "p2p"])
def test_an_engine_counts_nothing_as_weights_whose_share_was_ended_while_it_read(engines, monkeypatch, size, transport):
    """What shares may write its weights then: the other engine may have read some of both."""
    source, target = engines(1), engines(size)
    train(source, 1)
    server = ControlServer.open()
    request = ShareWeightsReq(
        package_version=__version__,
        protocol=PROTOCOL,
        address=server.address,
        timeout_s=30,
        transport=transport,
        verify="off",
    )
    assert source.share(request)[0].success
    assert not has_begun(server, engine_ranks=1)
    mailbox = Mailbox(server.address, "puller", 30)
    seen = []

    def end_then_run(program):
        seen.append(has_begun(server, engine_ranks=1))
        server.close()
        run_steps(program)

    run_steps = Program.run_steps
    monkeypatch.setattr(Program, "run_steps", end_then_run)  # when all has been read, before the last vote
    output = target.update(mailbox.request(30))
    assert seen[0] is True
    assert not output.success
    assert [bool(receiver.torn) for receiver in target.receivers] == [True] * size
    mailbox.close()


def test_the_session_key_is_in_no_frame_of_a_pull(engines, monkeypatch):
    """Frames are not encrypted: whoever reads the network must not learn from them how to join."""
    source, target = engines(2), engines(1)
    train(source, 1)
    frames, written = [], FrameWriter.frame
    monkeypatch.setattr(FrameWriter, "frame", lambda self, message: frames.append(written(self, message)) or frames[-1])
    with shared(source) as mailbox:
        request = mailbox.request(30)
        output = target.update(request)
        mailbox.answer(output)
    assert output.success
    assert any(request.layout.encode() in frame for frame in frames), "the request was seen"
    secret = request.address.key
    assert not any(secret.encode() in frame or bytes.fromhex(secret) in frame for frame in frames)

"""A probe's arithmetic, what a user may ask for, and the trainer's numbers."""

import math
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from sglang_reshard import Probe
from sglang_reshard.errors import Mismatch
from sglang_reshard.extras.probe import module_logprobs
from sglang_reshard.extras.probe.probing import compare, differences
from sglang_reshard.extras.probe.trainer import trainer_logprobs
from sglang_reshard.observability.probe_report import ProbedToken, ProbeReport
from support.probed import SEQUENCES, TRAINER
from support.world import run_world

NAN, INF = math.nan, math.inf


def test_differences_are_means_and_maxima():
    found = differences(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -2.0, -2.75]))
    assert found == (0.25, 0.5, 0, 3)


@pytest.mark.parametrize(
    ("ours", "theirs", "largest"),
    [(NAN, -1.0, INF), (-1.0, NAN, INF), (-INF, -1.0, INF), (-INF, -INF, 0.0), (NAN, NAN, INF), (-INF, INF, INF)],
)
def test_what_is_no_number_differs_without_limit(ours, theirs, largest):
    found = differences(torch.tensor([-1.0, ours]), torch.tensor([-1.0, theirs]))
    assert (found.largest, found.mean) == (largest, largest / 2)


def test_the_worst_token_is_named_of_any_data_parallel_rank():
    engine = (TRAINER, ((-1.0, -2.0), (-0.75,)))
    found, worst = compare(SEQUENCES, TRAINER, engine)
    assert (found.largest, found.mean, found.tokens) == (0.25, 0.25 / 6, 6)
    assert worst == ProbedToken(1, 1, 5, 1, -0.5, -0.75)


def report(mean, largest, **limits):
    return ProbeReport("7", mean_difference=mean, largest_difference=largest, **limits)


def test_each_threshold_is_a_limit_of_its_own():
    limits = {"mean_threshold": 0.1, "largest_threshold": 1.0}
    assert report(0.1, 1.0, **limits).passed
    assert "mean difference is 0.2 nats" in report(0.2, 1.0, **limits).exceeded()
    assert "largest difference is inf nats" in report(0.1, INF, **limits).exceeded()
    assert report(INF, INF).outcome == "passed", "without limits"
    assert not ProbeReport("7", skipped="paused").passed
    assert report(INF, 2.0).summary().mean_difference is None, "JSON has no infinity"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sequences": []}, "at least one sequence"),
        ({"sequences": [[1, 2], [3]]}, "sequence 1 of the probe has 1 tokens"),
        ({"sequences": [[1, -2]]}, "negative or not integers"),
        ({"sequences": [[1, 2.5]]}, "negative or not integers"),
        ({"sequences": [[1] * 70_000]}, "at most 65536"),
        ({"on_mismatch": "ignore"}, "on_mismatch='ignore'"),
        ({"mean_threshold": -1}, "mean_threshold=-1"),
        ({"largest_threshold": NAN}, "largest_threshold=nan"),
        ({"timeout_s": 0}, "timeout_s=0"),
    ],
)
def test_a_probe_that_makes_no_sense_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        Probe(**{"sequences": SEQUENCES, "logprobs": TRAINER, **changes})


class TinyModel(nn.Module):
    """Predicts a token from the one before it; with dropout, and with an output as transformers has it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, 16)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(16, 8)

    def forward(self, ids):
        return type("Output", (), {"logits": self.head(self.dropout(self.embedding(ids)))})()


def by_hand(model, tokens):
    with torch.no_grad():
        rows = model.head(model.embedding(torch.tensor(tokens[:-1]))).softmax(-1)
    return torch.tensor([rows[i, token] for i, token in enumerate(tokens[1:])]).log()


def test_a_module_is_run_without_dropout_and_stays_as_it_was():
    model = TinyModel().train()
    model.head.eval()
    for tokens, found in zip(SEQUENCES, module_logprobs(model, SEQUENCES), strict=True):
        torch.testing.assert_close(found, by_hand(model, tokens))
        assert not found.requires_grad
    assert (model.training, model.dropout.training, model.head.training) == (True, True, False)


@pytest.mark.parametrize(
    "given",
    [
        TRAINER,
        [torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([-0.5], dtype=torch.bfloat16)],
        lambda sequences: [[-1.0, -2.0], [-0.5]] if sequences == SEQUENCES else [],
    ],
    ids=["floats", "tensors", "function"],
)
def test_numbers_are_taken_in_any_form(given):
    assert trainer_logprobs(Probe([[3, 1, 4], (1, 5)], given)) == TRAINER


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([[-1.0, -2.0]], "1 entries for 2 sequences"),
        ([[-1.0, -2.0], [-0.5, -0.5]], "sequence 1 of 2 tokens; it must be"),
        ([torch.zeros(2), torch.zeros(1, 1)], r"shape \(1, 1\) for sequence 1"),
        ([torch.zeros(3), torch.zeros(1)], r"shape \(3,\) for sequence 0"),
        ([torch.zeros(2), torch.tensor(1.0)], r"shape \(\) for sequence 1"),
    ],
)
def test_too_few_or_too_many_numbers_are_refused(given, says):
    with pytest.raises(Mismatch, match=says):
        trainer_logprobs(Probe(SEQUENCES, given))


def train_sharded(trainer):
    """FSDP2's module as `logprobs`: twice, with weights that an optimizer has changed between, without a backward."""
    whole, model = TinyModel(), TinyModel()
    fully_shard(model.head)
    fully_shard(model)
    seen = []
    for _ in range(2):
        pairs = zip(module_logprobs(model, SEQUENCES), module_logprobs(whole, SEQUENCES), strict=True)
        seen += [float((sharded - of_whole).abs().max()) for sharded, of_whole in pairs]
        seen.append(0.0 if all(isinstance(p, DTensor) for p in model.parameters()) else 1.0)
        with torch.no_grad():
            for p in whole.parameters():
                p.mul_(1.5)
            for p in model.parameters():
                p.mul_(1.5)
    return seen


def test_a_sharded_module_computes_with_its_current_weights():
    seen, _ = run_world(2, 0, train_sharded, None)
    for of_rank in seen:
        assert max(of_rank) < 1e-6, of_rank


LAYOUTS = [
    ((4,), [Shard(2)]),
    ((4,), [Shard(1)]),
    ((4,), [Replicate()]),
    ((4,), [Partial()]),
    ((2, 2), [Shard(2), Shard(2)]),
    ((2, 2), [Replicate(), Shard(2)]),
    ((2, 2), [Shard(1), Shard(2)]),
    ((2, 2), [Partial(), Shard(2)]),
]


class Given(nn.Module):
    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, _):
        return self.logits


def shard_logits(trainer):
    """The largest difference by layout and size of the vocabulary, of which some leave ranks without a column."""
    tokens, found = [1, 0, 2, 1, 2], []
    for vocabulary in (13, 3):
        whole = 30 * torch.randn(1, len(tokens), vocabulary, generator=torch.Generator().manual_seed(vocabulary))
        (expected,) = module_logprobs(Given(whole), [tokens])
        for shape, placements in LAYOUTS:
            mesh = init_device_mesh("cpu", shape)
            base = [Replicate() if p.is_partial() else p for p in placements]
            logits = distribute_tensor(whole, mesh, base, src_data_rank=None)
            for dim, placement in enumerate(placements):
                if placement.is_partial():
                    local = logits.to_local() / mesh.size(dim)
                    logits = DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())
            with mock.patch.object(DTensor, "full_tensor", side_effect=AssertionError("logits were gathered")):
                (sharded,) = module_logprobs(Given(logits), [tokens])
            found.append(float((sharded - expected).abs().max()))
    return found


def test_shards_of_the_vocabulary_stay_where_they_are():
    told, _ = run_world(4, 0, shard_logits, None)
    for of_rank in told:
        assert len(of_rank) == 2 * len(LAYOUTS)
        assert max(of_rank) < 1e-4

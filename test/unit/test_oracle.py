"""Digests tell tensors apart, and forked work ends: with an answer, a traceback or at a deadline."""

import os
import time

import pytest
import torch

from sglang_reshard.cli.plan.forked_jobs import ChildFailed, run_in_forks
from sglang_reshard.errors import DeadlineExceeded
from tools.oracle.digests import digest, digests


def test_digests_depend_on_dtype_shape_and_every_element():
    tensor = torch.arange(6.0).reshape(2, 3)
    other = tensor.clone()
    other[1, 2] = -0.0
    zeros = torch.zeros(2, 3)
    assert digest(tensor) == digest(tensor.clone())
    assert len({digest(t) for t in (tensor, other, tensor.t(), tensor.bfloat16(), zeros, zeros.int())}) == 6


def test_digests_are_of_values_not_of_strides():
    tensor = torch.arange(6.0).reshape(2, 3)
    assert digest(tensor.t().contiguous().t()) == digest(tensor)


def test_digests_cover_buffers_and_attributes():
    model = torch.nn.Linear(2, 2)
    model.register_buffer("table", torch.zeros(3))
    model.w_kc = torch.zeros((), dtype=torch.bfloat16)
    assert set(digests(model)) == {"weight", "bias", "table", "w_kc"}


def test_forks_tell_what_went_wrong():
    with pytest.raises(ChildFailed, match=r"(?s)child for zero.*ZeroDivisionError"):
        list(run_in_forks(lambda _: 1 / 0, ["zero"], processes=1, deadline_seconds=60))
    with pytest.raises(ChildFailed, match="exit code 7"):
        list(run_in_forks(lambda _: os._exit(7), ["dead"], processes=1, deadline_seconds=60))


def test_forks_have_a_deadline():
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="sleeper"):
        list(run_in_forks(lambda _: time.sleep(60), ["sleeper"], processes=1, deadline_seconds=0.5))
    assert time.monotonic() - began < 20

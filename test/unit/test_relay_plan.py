"""Which engine reads which tensors from the trainer: evenly, each tensor once, in the layout's order."""

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_reshard.layout.source_layout import SourceLayout, SourceTensor
from sglang_reshard.routes.relay.member import divide
from sglang_reshard.routes.relay.progress import NO_OWNER
from support.plans import copies_of, loaded, meshed_layouts, read_plans, run_reads, shards, values

SIZES = st.lists(st.integers(0, 10**9), max_size=60)


def held(**dtypes):
    tensors = tuple(SourceTensor(name, (4,), dtype, 0, 0) for name, dtype in dtypes.items())
    return SourceLayout(1, (), (), tensors)


@given(SIZES, st.integers(1, 9), st.data())
def test_what_is_passed_on_is_divided_evenly_at_any_time(sizes, engines, data):
    relayed = np.array(data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes))), bool)
    tensors = tuple(SourceTensor(str(n), (size,), "uint8", 0, 0) for n, size in enumerate(sizes))
    layout = SourceLayout(1, (), (), tensors)
    passed_on = SourceLayout(1, (), (), tuple(itertools.compress(tensors, relayed)))
    owner_of = divide(layout, [layout] * (engines - 1) + [passed_on])
    assert ((owner_of == NO_OWNER) == ~relayed).all()
    read = np.zeros(engines, np.int64)
    for tensor in np.flatnonzero(relayed):
        read[owner_of[tensor]] += sizes[tensor]
        assert read.max() - read.min() <= max(sizes)


@st.composite
def jobs(draw):
    layout = draw(meshed_layouts())
    return layout, draw(copies_of(layout)), draw(st.integers(0, 2 ** len(layout.tensors) - 1))


@given(jobs())
def test_a_plan_of_some_tensors_reads_just_these(job):
    layout, copies, mask = job
    whole = values(layout)
    _, (plan,) = read_plans(layout, [copies])
    local = {t: shards(layout, whole, t) for t in range(layout.trainer_ranks)}
    chosen = np.array([bool(mask >> n & 1) for n in range(len(layout.tensors))], bool)
    expected, least = loaded(copies, whole), 0
    names = {tensor.name for tensor, is_chosen in zip(layout.tensors, chosen, strict=True) if is_chosen}
    first, second = run_reads(plan.only(chosen), local), run_reads(plan.only(~chosen), local)
    for copy in copies:
        found, other = (first, second) if copy.source in names else (second, first)
        assert torch.equal(copy.destination(found[copy.target]), copy.destination(expected[copy.target]))
        assert (copy.destination(other[copy.target]) == -1).all(), "it was read though it was not to be"
    for part in (plan.only(chosen), plan.only(~chosen)):
        least += part.least_bytes()
        assert (np.diff(part.trainer_ranks) >= 0).all(), "`reads_from` needs them in this order"
    assert least == plan.least_bytes()


def test_only_what_all_engines_hold_alike_is_passed_on():
    trainer = held(a="float32", b="float32", c="float32", d="float32")
    one = held(a="bfloat16", b="bfloat16", d="float32")
    other = held(d="float32", a="bfloat16", b="float32", c="float32")
    assert divide(trainer, [one, other]).tolist() == [0, NO_OWNER, NO_OWNER, 1]

"""Memory for what is quantized on arrival: shared by all that is not in it at the same time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.landings.base import Landing
from sglang_reshard.landings.converting import Lifetime, share_memory
from sglang_reshard.layout.regions import Box, Region
from sglang_reshard.trace.block_formats import FP8, quantize_blocks
from sglang_reshard.trace.program import Copy
from sglang_reshard.trace.tracer import trace
from support.sweep import examples
from toy_loader import BlockFp8Linear, Toy, specs_of

BLOCK, CPU = (4, 4), torch.device("cpu")
TURNS = 5

lifetimes = st.builds(
    lambda first, turns, nbytes: Lifetime(first, first + turns, nbytes),
    st.integers(0, 9), st.integers(0, 4), st.integers(1, 5000),
)  # fmt: skip


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(lifetimes, max_size=30))
def test_what_is_needed_at_the_same_time_does_not_overlap(given_lifetimes):
    offsets, total = share_memory(given_lifetimes)
    placed = list(zip(given_lifetimes, offsets, strict=True))
    for number, (one, at) in enumerate(placed):
        assert at % 256 == 0
        assert at + one.nbytes <= total
        for other, there in placed[:number]:
            at_once = one.first <= other.last and other.first <= one.last
            assert not at_once or at + one.nbytes <= there or there + other.nbytes <= at
    padded = [-(-one.nbytes // 256) * 256 for one in given_lifetimes]
    assert total <= sum(padded)


def load(toy, weights):
    for name, tensor in weights:
        toy.get_parameter(name).data.copy_(tensor)


def model_of(shapes):
    toy = Toy(load)
    toy.layers = torch.nn.ModuleList(BlockFp8Linear(*shape) for shape in shapes)
    generator = torch.Generator().manual_seed(1)
    weights = {f"layers.{n}.weight": torch.randn(shape, generator=generator) for n, shape in enumerate(shapes)}
    return toy, {name: tensor.bfloat16() for name, tensor in weights.items()}


class Journal:
    """Notes what has arrived after which turn, and that it is not quantized yet."""

    def __init__(self, weights, copies):
        self.weights, self.copies, self.seen = weights, copies, {}

    def place(self, program, complete):
        self.program, self.complete = program, complete

    def begin(self, update):
        self.seen = {}

    def arrived(self, turn):
        for target in self.complete[turn]:
            copy = self.copies[target]
            assert torch.equal(copy.destination(self.program.targets[target]), self.weights[copy.source])
            assert self.seen.setdefault(copy.source, turn) == turn, "twice"


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_each_is_quantized_when_its_last_part_is_there(data):
    """Parts arrive in any turns, or are read from mapped memory, and others may be received one turn ahead."""
    shapes = data.draw(st.lists(st.sampled_from([(4, 4), (8, 6), (5, 9)]), min_size=1, max_size=8))
    ahead, bucket = data.draw(st.integers(0, 1)), data.draw(st.sampled_from([1, 100, 10_000]))
    toy, weights = model_of(shapes)
    program = trace(toy, specs_of(weights))
    copies = {copy.target: copy for copy in program.copies}
    written = [set() for _ in range(TURNS)]
    halves = {}  # of each weight: the turn in which its upper and lower rows are written, None if they are read
    for target in program.arrivals:
        halves[target] = data.draw(st.tuples(*[st.one_of(st.none(), st.integers(0, TURNS - 1))] * 2))
        for turn in halves[target]:
            if turn is not None:
                written[turn].add(target)
    read = {target for target, turns in halves.items() if None in turns}
    landing = Landing(program).converting(CPU, bucket)
    landing.checks = Journal(weights, copies)
    landing.place(written, read, ahead)

    def write(target, half):
        copy = copies[target]
        rows = copy.region.count[0] // 2
        part = (slice(0, rows), slice(rows, None))[half]
        copy.destination(landing.program.targets[target])[part] = weights[copy.source][part]

    for update in range(2):
        landing.begin(None)
        for turn in range(landing.turns):
            for target, turns in halves.items():
                for half, of_half in enumerate(turns):
                    # In the second update all are received into their places as early as they may be.
                    now = landing.turn_of(target) if of_half is None else max(0, of_half - ahead * update)
                    if turn == now:
                        write(target, half)
            landing.arrived(turn)
        assert landing.finished == landing.turns
        assert landing.checks.seen.keys() == weights.keys()
    for name, weight in weights.items():
        quantized, scales = quantize_blocks(weight[None], BLOCK)
        assert torch.equal(toy.get_parameter(name).view(torch.uint8), quantized[0].view(torch.uint8))
        assert torch.equal(toy.get_parameter(f"{name}_scale_inv"), scales[0])


def test_a_route_that_does_not_know_of_conversions_is_refused():
    toy, weights = model_of([(4, 4), (8, 6)])
    program = trace(toy, specs_of(weights))
    landing = Landing(program).converting(CPU, 1)
    with pytest.raises(Unsupported, match=r"converts 2 weights .* Landing\.place"):
        landing.begin(None)
    landing.place([], program.arrivals)
    landing.begin(None)
    landing.arrived(0)
    with pytest.raises(Mismatch, match="the end of 1 of 2 turns"):
        landing.check(None)
    landing.arrived(1)
    assert landing.check(None) == ""


@pytest.mark.parametrize("experts", [1, 3, 7])
def test_a_large_stack_is_cut(experts, monkeypatch):
    """So that a checkpoint tensor of all experts need not be in memory at once."""
    monkeypatch.setattr("sglang_reshard.trace.block_fp8._STACK_ELEMENTS", 3 * 8 * 6)
    toy, _ = model_of([])
    toy.experts = BlockFp8Linear(8, 6)
    toy.experts.weight = torch.nn.Parameter(torch.zeros(experts, 8, 6).to(FP8), requires_grad=False)
    toy.experts.weight_scale_inv = torch.nn.Parameter(torch.zeros(experts, 2, 2), requires_grad=False)
    weight = torch.randn(experts, 8, 6, generator=torch.Generator().manual_seed(3)).bfloat16()
    program = trace(toy, specs_of({"experts.weight": weight}))
    assert [copy.region.count[0] for copy in program.copies] == [min(3, experts - n) for n in range(0, experts, 3)]
    whole = Copy("experts.weight", Region.of(Box.whole((experts, 8, 6))), "", 0, ())
    assert sum(copy.region.numel for copy in program.copies) == whole.region.numel
    landing = Landing(program).converting(CPU, 1)
    landing.place([], program.arrivals)
    for turn, copy in enumerate(program.copies):
        copy.destination(landing.program.targets[copy.target]).copy_(weight[copy.region.slices()])
        landing.arrived(turn)
    quantized, scales = quantize_blocks(weight, BLOCK)
    assert torch.equal(toy.experts.weight.view(torch.uint8), quantized.view(torch.uint8))
    assert torch.equal(toy.experts.weight_scale_inv, scales)

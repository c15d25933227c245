"""Whatever a loader does with its tensors, the program leaves the same bytes in the same memory."""

from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest
import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.trace.tracer import trace
from support.live_memory import fill_with_garbage
from tools.oracle.replay import replay
from toy_loader import Toy, check, contents, random, specs_of

BF16 = torch.bfloat16


def one(load, shape, **weights):
    """A model with the one parameter `w`; the loader is given all weights at once."""
    return check(lambda: Toy(lambda m, ws: load(m.w, dict(ws)), w=shape), weights)


def only_copies(program):
    return not program.steps and not program.scratch_bytes


@pytest.mark.parametrize(
    ("copied", "shape", "shapes", "expected"),
    [
        (lambda w, q, k: [(w[:4], q.narrow(0, 4, 4)), (w.narrow(0, 4, 2), k)], (6, 8), [(8, 8), (2, 8)], (2, 0, 0)),
        (
            lambda w, qkv: [
                (part, heads.reshape(8, 8))
                for part, heads in zip(w.chunk(3), qkv.view(4, 3, 2, 8).unbind(1), strict=True)
            ],
            (24, 8),
            [(24, 8)],
            (12, 0, 0),
        ),
        (lambda w, both: [(w[:, :4], both[..., ::2]), (w[:, 4:], both[..., 1::2])], (3, 8), [(3, 8)], (2, 0, 0)),
        # DeepSeek's fused A projections: two tensors are joined, and a shard of the whole is taken.
        (lambda w, a, b: [(w, torch.cat([a, b], dim=0).narrow(0, 2, 4))], (4, 8), [(4, 8), (4, 8)], (2, 0, 0)),
        # A small expansion becomes copies, and a large one is computed from one.
        (lambda w, t: [(w, t)], (4, 8), [(8,)], (4, 0, 0)),
        (lambda w, t: [(w, t)], (100, 8), [(8,)], (1, 1, 16)),
        # Operands land in scratch, and of a tensor only the part that is read; what is not computed is copied.
        (lambda w, a, s: [(w, (a.float() * s[:, None] - 1).to(BF16))], (4, 8), [(4, 8), (4,)], (2, 1, 72)),
        (lambda w, t: [(w, t[2:4] * 2)], (2, 8), [(100, 8)], (1, 1, 32)),
        (lambda w, a, b: [(w, torch.cat([a, b * 2]))], (4, 8), [(2, 8), (2, 8)], (2, 1, 32)),
        (lambda w, t: zip(w.chunk(2), sorted_and_order(t), strict=True), (4, 8), [(2, 8)], (1, 2, 32)),
    ],
)
def test_what_is_copied_is_so_many_copies_steps_and_bytes_of_scratch(copied, shape, shapes, expected):
    def load(w, ws):
        for target, source in copied(w.data, *ws.values()):
            target.copy_(source)

    program = one(load, shape, **{f"t{n}": random(*of, seed=n) for n, of in enumerate(shapes)})
    assert (len(program.copies), len(program.steps), program.scratch_bytes) == expected


def sorted_and_order(t):
    """An operator with several results, one of which is read by a constant."""
    values, order = torch.sort(t, dim=1)
    return values, order[:, torch.arange(7, -1, -1)].to(BF16)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t.t().contiguous(),
        lambda t: t.reshape(4, 2, 12).transpose(1, 2).reshape(12, 8),
        lambda t: t.view(4, 24).t().reshape(12, 8),
        lambda t: t[:, ::2].repeat(1, 1).reshape(6, 8).expand(2, 6, 8).reshape(12, 8)[:12],
        lambda t: torch.cat([t[:, 6:], t[:, :6]], dim=1).t(),
        lambda t: torch.stack([t[:4], t[4:]], dim=1).reshape(12, 8),
        lambda t: torch.stack(list(t.unbind(0))[::-1]).t(),
        lambda t: t.view(2, 2, 2, 12).permute(1, 3, 0, 2).flatten(1).reshape(12, 8),
        lambda t: torch.nn.functional.pad(t[:6, :10], (1, 1, 0, 2)).t(),
    ],
)
def test_views_and_rearrangements(view):
    one(lambda w, ws: w.data.copy_(view(ws["t"])), (12, 8), t=random(8, 12))


def test_strided_parameters():
    make = lambda: Toy(lambda m, ws: [m.w.data.copy_(w) for _, w in ws], w=torch.empty(8, 6).t())  # noqa: E731
    assert only_copies(check(make, {"t": random(6, 8, dtype=torch.float32)}))


def test_a_buffer_that_the_loader_fills_part_by_part():
    def load(w, ws):
        buffer = torch.zeros(6, 8, dtype=BF16)
        buffer[:2] = ws["a"]
        buffer[3:5].copy_(ws["b"])
        w.data.copy_(buffer)

    program = one(load, (6, 8), a=random(2, 8), b=random(2, 8, seed=1))
    assert {c.source for c in program.copies} == {"a", "b"}
    assert not program.scratch_bytes


def test_a_source_that_is_mutated():
    """gpt-oss zeroes a bias off rank 0: the record sees it, the caller's tensor does not."""

    def load(w, ws):
        w.data[0].copy_(ws["bias"])
        ws["bias"].zero_()
        ws["bias"][2:4].add_(1)
        w.data[1].copy_(ws["bias"])

    one(load, (2, 8), bias=random(8))


def test_a_copy_is_a_copy():
    """What is done to a clone afterwards is not in what was copied out of it before."""

    def load(w, ws):
        kept = ws["t"].clone()
        half = kept[:2] * 2
        w.data[:2].copy_(kept[:2])
        kept.zero_()
        w.data[2:4].copy_(half)
        w.data[4:].copy_(kept[:2])

    one(load, (6, 8), t=random(4, 8))


# ---- casts


@pytest.mark.parametrize(
    ("source", "cast", "copies"),
    [
        (torch.float32, None, True),
        (torch.float32, BF16, True),
        (BF16, torch.float32, True),
        (torch.float32, torch.float16, False),
        (torch.float16, torch.float32, True),
    ],
)
def test_casts(source, cast, copies):
    def load(w, ws):
        t = ws["t"] if cast is None else ws["t"].to(cast)
        w.data.copy_(t[:, 1:])

    program = one(load, (4, 7), t=random(4, 8, dtype=source) * 1.001)
    assert only_copies(program) == copies


def test_bytes_of_another_dtype():
    """A uint8 parameter filled with the bits of an fp8 tensor: no cast."""
    fp8 = random(4, 8).to(torch.float8_e4m3fn)
    make = lambda: Toy(  # noqa: E731
        lambda m, ws: [m.w.data.copy_(w.view(torch.uint8)) for _, w in ws], w=torch.empty(4, 8, dtype=torch.uint8)
    )
    program = check(make, {"t": fp8})
    assert only_copies(program)
    assert list(program.targets) == ["w as float8_e4m3fn"]


def test_one_storage_as_two_dtypes():
    def load(m, ws):
        ws = dict(ws)
        m.w.data[:8].copy_(ws["a"])
        m.w.data[8:].view(BF16).copy_(ws["b"])

    weights = {"a": torch.arange(8, dtype=torch.uint8), "b": random(4)}
    program = check(lambda: Toy(load, w=torch.empty(16, dtype=torch.uint8)), weights)
    assert set(program.targets) == {"w", "w as bfloat16"}


# ---- fills and expressions


def test_vocabulary_padding_is_filled():
    def load(w, ws):
        w[:5].data.copy_(ws["t"])
        w[5:].data.fill_(0)

    assert [s.description for s in one(load, (8, 4), t=random(5, 4)).steps] == ["fill 0"]


def test_a_fill_that_is_loaded_over():
    """Steps run last; a fill that came first must leave alone what was loaded into it."""

    def load(w, ws):
        w.data.zero_()
        w.data[1:3, 2:].copy_(ws["t"])

    one(load, (4, 6), t=random(2, 4))


def test_what_was_loaded_is_moved_within_its_memory():
    """DeepSeek-V4's compressors: an element is written where another is read."""

    def turned(w, ws):
        w.data.copy_(ws["t"])
        w.data.copy_(w.data.t().clone())

    def halves(w, ws):
        w.data.copy_(ws["t"])
        left, right = torch.chunk(w.data, 2, dim=-1)
        w.data.copy_(torch.cat([left, right], dim=0).view(4, 6))

    one(turned, (5, 5), t=random(5, 5))
    one(halves, (4, 6), t=random(4, 6))


def test_reading_back_what_was_loaded():
    """Gemma: a buffer is rebound to weight + 1; its memory is kept."""

    def load(m, ws):
        for _, w in ws:
            m.w.data.copy_(w)
            m.plus_one = m.w.data + 1.0

    def make():
        toy = Toy(load, w=(8,))
        toy.register_buffer("plus_one", torch.empty(8, dtype=BF16))
        return toy

    program = check_addresses(make, {"t": random(8)})
    assert [s.target for s in program.steps] == ["plus_one"]


def check_addresses(make, weights):
    """Like `check` for a loader that rebinds, which the comparison with stock must not hold against it."""
    traced, stock = make(), make()
    fill_with_garbage(traced)
    addresses = {n: t.data_ptr() for n, t in (*traced.named_parameters(), *traced.named_buffers())}
    program = trace(traced, specs_of(weights))
    replay(program, weights)
    stock.load_weights(iter(weights.items()))
    assert contents(traced) == contents(stock)
    after = {n: t.data_ptr() for n, t in (*traced.named_parameters(), *traced.named_buffers())}
    assert after == addresses
    return program


def test_a_rebound_parameter():
    def load(m, ws):
        for _, w in ws:
            m.w = torch.nn.Parameter(w[:4].clone(), requires_grad=False)

    program = check_addresses(lambda: Toy(load, w=(4, 8)), {"t": random(6, 8)})
    assert only_copies(program)


def test_in_place_update_of_a_loaded_parameter():
    def load(w, ws):
        w.data.copy_(ws["t"])
        w.data[2:].mul_(3)

    one(load, (4, 8), t=random(4, 8))


def test_one_parameter_copied_to_another():
    def load(m, ws):
        for _, w in ws:
            m.a.data.copy_(w)
            m.b.data.copy_(m.a.data)

    check(lambda: Toy(load, a=(4, 8), b=(4, 8)), {"t": random(4, 8)})


# ---- scalars


def test_a_scalar_by_item():
    def load(w, ws):
        for i, name in enumerate(ws):
            w.data[i].fill_(ws[name].item())

    weights = {f"scale{i}": random(1, dtype=torch.float32, seed=i) for i in range(3)}
    program = one(load, (3,), **weights)
    assert only_copies(program)
    assert [c.source for c in program.copies] == list(weights)


def test_a_scalar_into_many_elements():
    one(lambda w, ws: w.data.fill_(float(ws["s"])), (200,), s=random(1, dtype=torch.float32))


# ---- how the loader runs


def test_worker_threads():
    def load(m, ws):
        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(lambda n, w: m.get_parameter(n).data.copy_(w), n, w) for n, w in ws]
            for future in as_completed(futures):
                future.result()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda p: p.data[1:].fill_(0), [m.c]))

    weights = {"a": random(4, 8), "b": random(4, 8, seed=1)}

    def loader(m, ws):
        load(m, ws)
        m.c.data[0].fill_(1)

    check(lambda: Toy(loader, a=(4, 8), b=(4, 8), c=(2,)), weights)


def test_post_load_weights_runs_after_the_copies_and_keeps_addresses():
    class Attention(Toy):
        calls = 0

        def post_load_weights(self, names):
            Attention.calls += 1
            self.w_kc = self.w.data.t().contiguous() * 2

    def load(m, ws):
        names = []
        for name, w in ws:
            m.w.data.copy_(w)
            names.append(name)
        m.post_load_weights(names)

    def make():
        toy = Attention(load, w=(4, 8))
        toy.w_kc = torch.empty(8, 4, dtype=BF16)
        return toy

    traced = make()
    memory = traced.w_kc
    weights = {"t": random(4, 8)}
    program = trace(traced, specs_of(weights))
    assert Attention.calls == 0
    assert program.steps[-1].description == "post_load_weights"
    replay(program, weights)
    assert Attention.calls == 1
    assert traced.w_kc is memory
    assert torch.equal(memory, weights["t"].t() * 2)


def test_inference_mode():
    """An engine's request handlers may run in it."""
    with torch.inference_mode():
        one(lambda w, ws: w.data.copy_(ws["t"].t() * 2), (4, 8), t=random(8, 4))
        program = one(lambda w, ws: w.data.copy_(torch.cat([ws["t"].t()])), (4, 8), t=random(8, 4))
    assert only_copies(program)


def test_a_tensor_that_this_rank_does_not_need_is_not_copied():
    def load(m, ws):
        for name, w in ws:
            if name != "rotary.inv_freq":
                m.w.data.copy_(w)

    program = check(lambda: Toy(load, w=(4,)), {"rotary.inv_freq": random(8), "t": random(4)})
    assert [c.source for c in program.copies] == ["t"]


def test_plain_attributes_and_lists_are_live():
    def load(m, ws):
        for _, w in ws:
            m.plain.copy_(w)
            m.several[1].copy_(w * 2)

    def make():
        toy = Toy(load)
        toy.plain = torch.empty(4)
        toy.several = [torch.empty(4), torch.empty(4)]
        return toy

    assert set(check(make, {"t": random(4, dtype=torch.float32)}).targets) >= {"plain", "several.1"}


def test_what_a_loader_writes_twice_from_the_same_tensor_is_copied_once():
    """As a draft does that shares its target's embedding."""

    def load(m, ws):
        tensors = dict(ws)
        for _ in range(2):
            m.w.data[:3].copy_(tensors["t"])
            m.w.data[3:].fill_(0)

    program = check(lambda: Toy(load, w=(4, 8)), {"t": random(3, 8)})
    assert [c.source for c in program.copies] == ["t"]


def test_what_a_loader_writes_twice_from_two_tensors_is_refused():
    def load(m, ws):
        for _, tensor in ws:
            m.w.data.copy_(tensor)

    with pytest.raises(Unsupported, match="more than once, from a, b"):
        trace(Toy(load, w=(4,)), specs_of({"a": random(4), "b": random(4, seed=1)}))


def test_a_module_that_the_loader_deletes_is_put_back_in_its_place():
    def load(m, ws):
        m.first.w.data.copy_(dict(ws)["t"])
        del m.first

    toy = Toy(load, w=(4,))
    toy.first, toy.second = Toy(load, w=(4,)), Toy(load, w=(2,))
    before = [name for name, _ in toy.named_parameters()]
    with pytest.raises(Unsupported, match="not written by the loader"):
        trace(toy, specs_of({"t": random(4)}))
    assert [name for name, _ in toy.named_parameters()] == before

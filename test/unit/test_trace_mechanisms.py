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


F32, F16 = torch.float32, torch.float16


def only_copies(program):
    return not program.steps and not program.scratch_bytes


def like(shape, seed):
    """A tensor of a shape in bfloat16, or in the dtype that comes after it."""
    *shape, dtype = shape if isinstance(shape[-1], torch.dtype) else (*shape, BF16)
    return random(*shape, dtype=dtype, seed=seed)


@pytest.mark.parametrize(
    ("statements", "shape", "shapes", "expected"),
    [
        ("w[:4].copy_(a.narrow(0, 4, 4)); w.narrow(0, 4, 2).copy_(b)", (6, 8), [(8, 8), (2, 8)], (2, 0, 0)),
        (
            "for part, heads in zip(w.chunk(3), a.view(4, 3, 2, 8).unbind(1)): part.copy_(heads.reshape(8, 8))",
            (24, 8),
            [(24, 8)],
            (12, 0, 0),
        ),
        ("w[:, :4].copy_(a[..., ::2]); w[:, 4:].copy_(a[..., 1::2])", (3, 8), [(3, 8)], (2, 0, 0)),
        # DeepSeek's fused A projections: two tensors are joined, and a shard of the whole is taken.
        ("w.copy_(torch.cat([a, b], dim=0).narrow(0, 2, 4))", (4, 8), [(4, 8), (4, 8)], (2, 0, 0)),
        # A small expansion becomes copies, and a large one is computed from one.
        ("w.copy_(a)", (4, 8), [(8,)], (4, 0, 0)),
        ("w.copy_(a)", (100, 8), [(8,)], (1, 1, 16)),
        # Operands land in scratch, and of a tensor only the part that is read; what is not computed is copied.
        ("w.copy_((a.float() * b[:, None] - 1).to(BF16))", (4, 8), [(4, 8), (4,)], (2, 1, 72)),
        ("w.copy_(a[2:4] * 2)", (2, 8), [(100, 8)], (1, 1, 32)),
        ("w.copy_(torch.cat([a, b * 2]))", (4, 8), [(2, 8), (2, 8)], (2, 1, 32)),
        # An operator with several results, one of which is read by a constant.
        (
            "values, order = torch.sort(a, dim=1); w[:2].copy_(values)\n"
            "w[2:].copy_(order[:, torch.arange(7, -1, -1)].to(BF16))",
            (4, 8),
            [(2, 8)],
            (1, 2, 32),
        ),
        # Views and rearrangements.
        ("w.copy_(a.t())", (12, 8), [(8, 12)], None),
        ("w.copy_(a.t().contiguous())", (12, 8), [(8, 12)], None),
        ("w.copy_(a.reshape(4, 2, 12).transpose(1, 2).reshape(12, 8))", (12, 8), [(8, 12)], None),
        ("w.copy_(a.view(4, 24).t().reshape(12, 8))", (12, 8), [(8, 12)], None),
        ("w.copy_(a[:, ::2].repeat(1, 1).reshape(6, 8).expand(2, 6, 8).reshape(12, 8)[:12])", (12, 8), [(8, 12)], None),
        ("w.copy_(torch.cat([a[:, 6:], a[:, :6]], dim=1).t())", (12, 8), [(8, 12)], None),
        ("w.copy_(torch.stack([a[:4], a[4:]], dim=1).reshape(12, 8))", (12, 8), [(8, 12)], None),
        ("w.copy_(torch.stack(list(a.unbind(0))[::-1]).t())", (12, 8), [(8, 12)], None),
        ("w.copy_(a.view(2, 2, 2, 12).permute(1, 3, 0, 2).flatten(1).reshape(12, 8))", (12, 8), [(8, 12)], None),
        ("w.copy_(torch.nn.functional.pad(a[:6, :10], (1, 1, 0, 2)).t())", (12, 8), [(8, 12)], None),
        # A buffer that the loader fills part by part.
        (
            "buffer = torch.zeros(6, 8, dtype=BF16); buffer[:2] = a; buffer[3:5].copy_(b); w.copy_(buffer)",
            (6, 8),
            [(2, 8), (2, 8)],
            (2, 2, 0),
        ),
        # gpt-oss zeroes a bias off rank 0: the record sees it, the caller's tensor does not.
        ("w[0].copy_(a); a.zero_(); a[2:4].add_(1); w[1].copy_(a)", (2, 8), [(8,)], None),
        # What is done to a clone afterwards is not in what was copied out of it before.
        (
            "kept = a.clone(); half = kept[:2] * 2; w[:2].copy_(kept[:2]); kept.zero_()\n"
            "w[2:4].copy_(half); w[4:].copy_(kept[:2])",
            (6, 8),
            [(4, 8)],
            None,
        ),
        # A parameter with other strides.
        ("w.copy_(a)", torch.empty(8, 6).t(), [(6, 8, F32)], (1, 0, 0)),
        # Casts.
        ("w.copy_(a[:, 1:])", (4, 7), [(4, 8, F32)], (1, 0, 0)),
        ("w.copy_(a[:, 1:].to(BF16))", (4, 7), [(4, 8, F32)], (1, 0, 0)),
        ("w.copy_(a[:, 1:].to(F32))", (4, 7), [(4, 8)], (1, 0, 0)),
        ("w.copy_(a[:, 1:].to(F32))", (4, 7), [(4, 8, F16)], (1, 0, 0)),
        ("w.copy_(a[:, 1:].to(F16))", (4, 7), [(4, 8, F32)], (1, 1, 112)),
        # Padding of a vocabulary; a fill that comes first leaves alone what was loaded into it: steps run last.
        ("w[:5].copy_(a); w[5:].fill_(0)", (8, 4), [(5, 4)], (1, 1, 0)),
        ("w.zero_(); w[1:3, 2:].copy_(a)", (4, 6), [(2, 4)], None),
        # DeepSeek-V4's compressors: what was loaded is moved within its memory, an element to where another is read.
        ("w.copy_(a); w.copy_(w.t().clone())", (5, 5), [(5, 5)], None),
        ("w.copy_(a); w.copy_(torch.cat(torch.chunk(w, 2, dim=-1)).view(4, 6))", (4, 6), [(4, 6)], None),
        ("w.copy_(a); w[2:].mul_(3)", (4, 8), [(4, 8)], None),
        # Scalars, into one element and into many.
        ("w[0].fill_(a.item()); w[1].fill_(b.item())", (2,), [(1, F32), (1, F32)], (2, 0, 0)),
        ("w.fill_(float(a))", (200,), [(1, F32)], None),
        # A tensor that this rank does not need is not copied, and what is written twice from one tensor is copied once.
        ("w.copy_(b)", (4,), [(8,), (4,)], (1, 0, 0)),
        ("for _ in range(2): w[:3].copy_(a); w[3:].fill_(0)", (4, 8), [(3, 8)], (1, 1, 0)),
    ],
)
def test_the_same_bytes_by_so_many_copies_steps_and_bytes_of_scratch(statements, shape, shapes, expected):
    code = compile(statements, "loader", "exec")
    make = lambda: Toy(  # noqa: E731
        lambda m, ws: exec(code, globals(), {"w": m.w.data, **dict(ws)}),
        w=shape.clone() if isinstance(shape, torch.Tensor) else shape,
    )
    program = check(make, {name: like(of, seed) for seed, (name, of) in enumerate(zip("ab", shapes, strict=False))})
    assert expected in (None, (len(program.copies), len(program.steps), program.scratch_bytes))


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


def test_one_parameter_copied_to_another():
    def load(m, ws):
        for _, w in ws:
            m.a.data.copy_(w)
            m.b.data.copy_(m.a.data)

    check(lambda: Toy(load, a=(4, 8), b=(4, 8)), {"t": random(4, 8)})


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
    for change, copies in ((lambda t: t.t() * 2, False), (lambda t: torch.cat([t.t()]), True)):
        with torch.inference_mode():
            load = lambda m, ws, change=change: [m.w.data.copy_(change(w)) for _, w in ws]  # noqa: E731
            program = check(lambda load=load: Toy(load, w=(4, 8)), {"t": random(8, 4)})
        assert only_copies(program) == copies


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

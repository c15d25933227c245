"""What cannot be carried is refused at trace time, by name, and the model is as it was."""

import threading

import pytest
import torch

from sglang_reshard.derived.live_signature import LiveSignature
from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.tracer import trace
from support.live_memory import fill_with_garbage
from toy_loader import Toy, contents

T = TensorSpec("layers.0.weight", (4, 8), "bfloat16")


def each(statements):
    """A loader that runs these statements with the model `m`, for each tensor `w` of this name."""
    code = compile(statements, "loader", "exec")
    return lambda m, ws: [exec(code, globals(), {"m": m, "w": w, "name": name}) for name, w in ws]


def refused(load, error, *words, specs=(T,), model=None, **parameters):
    """The trace raises `error` with these words in it, and nothing of the model has changed."""
    model = model or Toy(load, **(parameters or {"w": (4, 8)}))
    fill_with_garbage(model)
    before, signature = contents(model), LiveSignature(model).current()
    attributes = {p: dict(vars(m)) for p, m in model.named_modules()}
    with pytest.raises(error) as caught:
        trace(model, list(specs))
    for word in words:
        assert word in str(caught.value)
    assert contents(model) == before
    assert LiveSignature(model).current() == signature
    assert {p: dict(vars(m)) for p, m in model.named_modules()} == attributes
    return caught.value


COPY = "m.w.data.copy_(w)"
SCALE = TensorSpec("input_scale", (1,), "float32")
REFUSED = [
    # not written, or written twice
    (COPY, Unsupported, ["bias is not written"], {"w": (4, 8), "bias": (4,)}),
    ("m.w.data[1:5].copy_(w)", Unsupported, ["w is not written completely: 16 of its 48", T.name], {"w": (6, 8)}),
    (
        COPY,
        Unsupported,
        ["elements of w more than once", T.name, "again.weight"],
        {"specs": (T, TensorSpec("again.weight", (4, 8), "bfloat16"))},
    ),
    (
        "m.w.data[:, ::2].copy_(w[:, ::2]); m.w.data[:, 1::2].copy_(w[:, 1::2]); m.w.data[3:, 7:].copy_(w[3:, 7:])",
        Unsupported,
        ["writes elements of w more than once"],
        {},
    ),
    *(
        (COPY, Unsupported, [f"{name} is not written", "needs its scale"], {"w": (4, 8), name: (1,)})
        for name in ("w_scale_inv", "w_scale", "input_scale", "router_scale")
    ),
    # what the loader raises, also if it catches it
    ("raise KeyError(f'{name} is not a parameter')", Mismatch, [T.name, "KeyError"], {}),
    ("assert m.w.shape == w.shape, 'shapes differ'", Mismatch, [T.name, "shapes differ"], {"w": (4, 7)}),
    (COPY, Mismatch, [T.name], {"w": (4, 7)}),
    (COPY, Mismatch, [T.name], {"w": (8,)}),
    ("try:\n  m.w.data.copy_(w.nonzero())\nexcept Exception:\n  m.w.data.fill_(0)", Unsupported, [], {}),
    # values
    ("if w.sum().item() > 0: m.w.data.copy_(w)", Unsupported, [T.name, "item()"], {}),
    (
        "m.w.data.fill_(w.item())",
        Unsupported,
        ["kind"],
        {"specs": (TensorSpec("kind", (1,), "int64"),), "w": (1,)},
    ),
    *(
        (look, Unsupported, ["input_scale", "update_weights_from_tensor"], {"specs": (SCALE,), "w": (1,)})
        for look in ("w.item() > 1", "w.item() + 1", "bool(w.item())", "2 / w.item()")
    ),
    ("m.w.data.copy_(torch.ones(1) * float(w))", Unsupported, ["input_scale"], {"specs": (SCALE,), "w": (1,)}),
    ("w.numpy()", Unsupported, [T.name], {}),
    ("w.data_ptr()", Unsupported, [T.name], {}),
    # other memory
    (f"{COPY}; m.cached = w * 2", Unsupported, ["cached", "nothing"], {}),
    ("m.w = torch.nn.Parameter(w[:2], requires_grad=False)", Unsupported, ["w", "(2, 8)", "(4, 8)"], {}),
    (
        "fresh = torch.empty_like(w); fresh[1:].copy_(w[1:]); m.w.data.copy_(fresh)",
        Unsupported,
        ["w", "did not fill"],
        {},
    ),
    ("torch.add(w, 1, out=m.w.data)", Unsupported, ["aten.add.out"], {}),
    # dtypes and names
    *(
        (
            COPY,
            Unsupported,
            [T.name, have],
            {"specs": (TensorSpec(T.name, (4, 8), have),), "w": torch.zeros(4, 8, dtype=want)},
        )
        for have, want in (("bfloat16", torch.int8), ("int32", torch.float32), ("bfloat16", torch.float8_e4m3fn))
    ),
    ("", Unsupported, ["x", "int3"], {"specs": (TensorSpec("x", (1,), "int3"),)}),
    ("", Mismatch, [T.name, "twice"], {"specs": (T, T)}),
]


@pytest.mark.parametrize(("load", "error", "words", "options"), REFUSED)
def test_what_cannot_be_traced_is_refused_by_name(load, error, words, options):
    raised = refused(each(load), error, *words, **options)
    assert "KeyError" not in words or isinstance(raised.__cause__, KeyError)


@pytest.mark.parametrize(("value", "allowed"), [(1.0, True), (-1.0, True), (0.5, False)])
def test_a_scale_of_the_kv_cache_may_be_missing_unless_one_was_loaded(value, allowed):
    model = Toy(each(COPY), w=(4, 8), k_scale=())
    with torch.no_grad():
        model.k_scale.fill_(value)
    if allowed:
        assert trace(model, [T]).copies
    else:
        with pytest.raises(Unsupported, match="k_scale is not written"):
            trace(model, [T])


def test_new_scales_of_the_kv_cache_are_taken_over():
    class Method:
        def process_weights_after_loading(self, layer):
            layer.k_scale_float = float(layer.k_scale)

    model = Toy(lambda m, ws: [m.attention.k_scale.data.copy_(w.reshape(())) for _, w in ws])
    model.attention = Toy(None, k_scale=())
    model.attention.quant_method = Method()
    program = trace(model, [TensorSpec("attention.k_scale", (1,), "float32")])
    program.targets["attention.k_scale"].fill_(0.25)
    program.run_steps()
    assert model.attention.k_scale_float == 0.25


def test_a_shape_that_an_engine_may_have_changed_itself():
    """By a quantization method that transposes what it loads."""

    class Int8LinearMethod: ...

    class UnquantizedLinearMethod: ...

    model = Toy(each(COPY), w=(4, 7))
    model.quant_method = Int8LinearMethod()
    refused(None, Mismatch, "transposed or packed", "Int8LinearMethod", model=model)
    model.quant_method = UnquantizedLinearMethod()
    assert "packed" not in str(refused(None, Mismatch, T.name, model=model))


def test_attributes_are_put_back():
    def load(m, ws):
        m.loaded, m.cache["x"] = True, 1
        m.w.extra = 3
        del m.old
        m.w.data = torch.zeros(1)
        raise RuntimeError("halfway")

    model = Toy(load, w=(4, 8))
    model.cache, model.old, model.loaded = {}, 1, False
    refused(load, Mismatch, "halfway", model=model)
    assert model.cache == {}
    assert not hasattr(model.w, "extra")


def test_weights_that_stay_in_a_container():
    model = Toy(each(f"{COPY}; m.cache.append(w)"), w=(4, 8))
    model.cache = []
    refused(None, Unsupported, "cache", model=model)
    assert model.cache == []


def test_a_tensor_that_is_nobodys():
    elsewhere = torch.zeros(4, 8, dtype=torch.bfloat16)

    def load(m, ws):
        for _, w in ws:
            m.w.data.copy_(w)
            elsewhere.copy_(w)

    refused(load, Unsupported, "neither a parameter")
    assert not elsewhere.any()


def test_reading_before_loading():
    """Copies all land first, so a step cannot see what was there before."""

    def load(m, ws):
        ws = dict(ws)
        m.w.data[:2].copy_(ws["a"])
        m.b.copy_(m.w.data * 2)
        m.w.data[2:].copy_(ws["b"])

    model = Toy(load, w=(4, 8))
    model.register_buffer("b", torch.zeros(4, 8, dtype=torch.bfloat16))
    specs = [TensorSpec("a", (2, 8), "bfloat16"), TensorSpec("b", (2, 8), "bfloat16")]
    refused(None, Unsupported, "before it has loaded b", model=model, specs=specs)


def test_a_loader_with_threads_of_its_own():
    def load(m, ws):
        for _, w in ws:
            thread = threading.Thread(target=m.w.data.copy_, args=(w,))
            thread.start()
            thread.join()

    # The thread's own traceback is the interpreter's to print.
    hook, threading.excepthook = threading.excepthook, lambda args: None
    try:
        refused(load, Unsupported, "starts its own threads")
    finally:
        threading.excepthook = hook

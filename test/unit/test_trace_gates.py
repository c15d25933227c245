"""What cannot be carried is refused at trace time, by name, and the model is as it was."""

import threading

import pytest
import torch

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.live_signature import live_signature
from sglang_reshard.trace.tracer import trace
from support.live_memory import fill_with_garbage
from toy_loader import Toy, contents

T = TensorSpec("layers.0.weight", (4, 8), "bfloat16")


def refused(load, error, *words, specs=(T,), model=None, **parameters):
    """The trace raises `error` with these words in it, and nothing of the model has changed."""
    model = model or Toy(load, **(parameters or {"w": (4, 8)}))
    fill_with_garbage(model)
    before, signature = contents(model), live_signature(model)
    attributes = {p: dict(vars(m)) for p, m in model.named_modules()}
    with pytest.raises(error) as caught:
        trace(model, list(specs))
    for word in words:
        assert word in str(caught.value)
    assert contents(model) == before
    assert live_signature(model) == signature
    assert {p: dict(vars(m)) for p, m in model.named_modules()} == attributes
    return caught.value


def each(action):
    return lambda m, ws: [action(m, w) for _, w in ws]


def test_a_parameter_that_is_not_written():
    refused(each(lambda m, w: m.w.data.copy_(w)), Unsupported, "bias is not written", w=(4, 8), bias=(4,))


def test_a_parameter_that_is_written_in_part():
    refused(each(lambda m, w: m.w.data[1:5].copy_(w)), Unsupported, "w is not written completely: 16 of its 48",
            T.name, w=(6, 8))  # fmt: skip


def test_a_parameter_that_is_written_twice():
    second = TensorSpec("again.weight", (4, 8), "bfloat16")
    refused(each(lambda m, w: m.w.data.copy_(w)), Unsupported, "elements of w more than once", T.name, "again.weight",
            specs=(T, second))  # fmt: skip


def test_two_strided_writes_that_share_elements():
    def load(m, w):
        m.w.data[:, ::2].copy_(w[:, ::2])
        m.w.data[:, 1::2].copy_(w[:, 1::2])
        m.w.data[3:, 7:].copy_(w[3:, 7:])

    refused(each(load), Unsupported, "writes elements of w more than once")


@pytest.mark.parametrize("name", ["w_scale_inv", "w_scale", "input_scale", "router_scale"])
def test_a_scale_that_is_not_written(name):
    refused(each(lambda m, w: m.w.data.copy_(w)), Unsupported, f"{name} is not written", "needs its scale",
            w=(4, 8), **{name: (1,)})  # fmt: skip


@pytest.mark.parametrize(("value", "allowed"), [(1.0, True), (-1.0, True), (0.5, False)])
def test_a_scale_of_the_kv_cache_may_be_missing_unless_one_was_loaded(value, allowed):
    model = Toy(each(lambda m, w: m.w.data.copy_(w)), w=(4, 8), k_scale=())
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


def test_a_loader_that_raises():
    def load(m, ws):
        for name, _ in ws:
            raise KeyError(f"{name} is not a parameter")

    error = refused(load, Mismatch, T.name, "KeyError")
    assert isinstance(error.__cause__, KeyError)


def test_a_shape_that_the_loader_asserts():
    def load(m, w):
        assert m.w.shape == w.shape, "shapes differ"

    refused(each(load), Mismatch, T.name, "shapes differ", w=(4, 7))


def test_a_shape_that_an_engine_may_have_changed_itself():
    """By a quantization method that transposes what it loads."""

    class Int8LinearMethod: ...

    class UnquantizedLinearMethod: ...

    def load(m, w):
        assert m.w.shape == w.shape, "shapes differ"

    model = Toy(each(load), w=(4, 7))
    model.quant_method = Int8LinearMethod()
    refused(None, Mismatch, "transposed or packed", "Int8LinearMethod", model=model)
    model.quant_method = UnquantizedLinearMethod()
    assert "packed" not in str(refused(None, Mismatch, T.name, model=model))


def test_a_shape_that_torch_rejects():
    refused(each(lambda m, w: m.w.data.copy_(w)), Mismatch, T.name, w=(4, 7))
    refused(each(lambda m, w: m.w.data.copy_(w)), Mismatch, T.name, w=(8,))


def test_an_error_that_the_loader_swallows():
    def load(m, w):
        try:
            m.w.data.copy_(w.nonzero())
        except Exception:
            m.w.data.fill_(0)

    refused(each(load), Unsupported)


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


def test_a_value_that_steers_the_loader():
    def load(m, w):
        if w.sum().item() > 0:
            m.w.data.copy_(w)

    refused(each(load), Unsupported, T.name, "item()")


def test_an_integer_that_steers_the_loader():
    spec = TensorSpec("kind", (1,), "int64")
    refused(each(lambda m, w: m.w.data.fill_(w.item())), Unsupported, "kind", specs=(spec,), w=(1,))


@pytest.mark.parametrize("look", [lambda s: s > 1, lambda s: s + 1, lambda s: bool(s), lambda s: 2 / s])
def test_a_scalar_whose_value_is_not_known(look):
    spec = TensorSpec("input_scale", (1,), "float32")
    refused(each(lambda m, w: look(w.item())), Unsupported, "input_scale", "update_weights_from_tensor",
            specs=(spec,), w=(1,))  # fmt: skip


def test_arithmetic_with_a_scalar():
    def load(m, w):
        m.w.data.copy_(torch.ones(1) * float(w))

    spec = TensorSpec("input_scale", (1,), "float32")
    refused(each(load), Unsupported, "input_scale", specs=(spec,), w=(1,))


def test_a_rebinding_with_nothing_to_keep():
    def load(m, w):
        m.w.data.copy_(w)
        m.cached = w * 2

    refused(each(load), Unsupported, "cached", "nothing")


def test_a_rebinding_to_another_shape():
    def load(m, w):
        m.w = torch.nn.Parameter(w[:2], requires_grad=False)

    refused(each(load), Unsupported, "w", "(2, 8)", "(4, 8)")


def test_weights_that_stay_in_a_container():
    def load(m, w):
        m.w.data.copy_(w)
        m.cache.append(w)

    model = Toy(each(load), w=(4, 8))
    model.cache = []
    refused(None, Unsupported, "cache", model=model)
    assert model.cache == []


def test_a_tensor_that_is_nobodys():
    elsewhere = torch.zeros(4, 8, dtype=torch.bfloat16)

    def load(m, w):
        m.w.data.copy_(w)
        elsewhere.copy_(w)

    refused(each(load), Unsupported, "neither a parameter")
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


def test_uninitialised_memory():
    def load(m, w):
        fresh = torch.empty_like(w)
        fresh[1:].copy_(w[1:])
        m.w.data.copy_(fresh)

    refused(each(load), Unsupported, "w", "did not fill")


@pytest.mark.parametrize(("have", "want"), [("bfloat16", torch.int8), ("int32", torch.float32),
                                            ("bfloat16", torch.float8_e4m3fn)])  # fmt: skip
def test_a_cast_that_loses_the_meaning(have, want):
    spec = TensorSpec("layers.0.weight", (4, 8), have)
    refused(each(lambda m, w: m.w.data.copy_(w)), Unsupported, T.name, have, specs=(spec,),
            w=torch.zeros(4, 8, dtype=want))  # fmt: skip


def test_a_dtype_that_nobody_knows():
    refused(each(lambda m, w: None), Unsupported, "x", "int3", specs=(TensorSpec("x", (1,), "int3"),))


def test_a_name_twice():
    refused(each(lambda m, w: None), Mismatch, T.name, "twice", specs=(T, T))


def test_a_loader_with_threads_of_its_own():
    def load(m, w):
        thread = threading.Thread(target=lambda: m.w.data.copy_(w))
        thread.start()
        thread.join()

    # The thread's own traceback is the interpreter's to print.
    hook, threading.excepthook = threading.excepthook, lambda args: None
    try:
        refused(each(load), Unsupported, "starts its own threads")
    finally:
        threading.excepthook = hook


def test_bytes_are_not_there():
    refused(each(lambda m, w: w.numpy()), Unsupported, T.name)
    refused(each(lambda m, w: w.data_ptr()), Unsupported, T.name)


def test_an_operation_that_writes_in_unknown_ways():
    def load(m, w):
        torch.add(w, 1, out=m.w.data)

    refused(each(load), Unsupported, "aten.add.out")

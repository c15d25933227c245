"""Layers that keep, in one of many places, one of several values that their first forward pass computes from a weight.

PLACES has the code of each place and VALUES the expression of each value; `layer` compiles a layer of both as a Python
module of its own, as state may be in its globals.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import indent

from support.deriving import Linear

VALUES = {
    "copy": "weight.float()",
    "padded": "F.pad(weight.float().t(), (0, 2, 0, 3))",
    "quantized": "(weight.float() * 10).to(torch.int8)",
    "rows": "weight.float().sum(1)",
    "scalar": "weight.float().abs().max()",
    "number": "weight.float().abs().max().item()",
    "numbers": "weight.float().sum(1).tolist()",
}

# Code of a class: what its constructor adds, and its forward pass. `of(weight)` computes the value, `use` computes with
# it.
PLACES = {
    "attribute": ("self._c = None", "if self._c is None: self._c = of(self.weight)\nreturn use(x, self._c)"),
    "new attribute": ("", "if not hasattr(self, '_c'): self._c = of(self.weight)\nreturn use(x, self._c)"),
    "attribute by name": (
        "",
        "n = '_kept'\nif not hasattr(self, n): setattr(self, n, of(self.weight))\nreturn use(x, getattr(self, n))",
    ),
    "attribute of an exception": (
        "",
        "try: return use(x, self._c)\nexcept AttributeError: self._c = of(self.weight)\nreturn use(x, self._c)",
    ),
    "two attributes": (
        "self._a = self._b = None",
        "if self._a is None:\n    self._a = of(self.weight)\n    self._b = self._a\nreturn use(x, self._b)",
    ),
    "attribute with a count": (
        "self._c, self._v = None, -1",
        "if self._v != 0: self._c, self._v = of(self.weight), 0\nreturn use(x, self._c)",
    ),
    "attribute by a method": ("self._c = None", "self.ensure()\nreturn use(x, self._c)"),
    "cached property": ("", "return use(x, self.kept)"),
    "attribute of a parameter": (
        "",
        "if not hasattr(self.weight, '_c'): self.weight._c = of(self.weight)\nreturn use(x, self.weight._c)",
    ),
    "slots": ("self._s = Slots()", "if self._s.c is None: self._s.c = of(self.weight)\nreturn use(x, self._s.c)"),
    "object": ("self._h = Helper(None)", "return use(x, self._h.get(self.weight))"),
    "layer, by an object": ("self._c, self._m = None, Method()", "return self._m.apply(self, x)"),
    "hidden module": (
        "self.parts = [Hidden()]",
        "self.parts[0].weight = self.weight\nreturn self.parts[0](x)",
    ),
    "new object": ("self._h = None", "if self._h is None: self._h = Helper(of(self.weight))\nreturn use(x, self._h.c)"),
    "frozen dataclass": (
        "self._h = None",
        "if self._h is None: self._h = Frozen(of(self.weight))\nreturn use(x, self._h.c)",
    ),
    "namespace": (
        "self._n = types.SimpleNamespace(c=None)",
        "if self._n.c is None: self._n.c = of(self.weight)\nreturn use(x, self._n.c)",
    ),
    "thread": (
        "self._l = threading.local()",
        "if not hasattr(self._l, 'c'): self._l.c = of(self.weight)\nreturn use(x, self._l.c)",
    ),
    "list": ("self._l = []", "if not self._l: self._l.append(of(self.weight))\nreturn use(x, self._l[0])"),
    "list of None": (
        "self._l = [None]",
        "if self._l[0] is None: self._l[0] = of(self.weight)\nreturn use(x, self._l[0])",
    ),
    "deque": ("self._l = deque()", "if not self._l: self._l.append(of(self.weight))\nreturn use(x, self._l[0])"),
    "tuple": (
        "self._t = (None, 0)",
        "if self._t[0] is None: self._t = (of(self.weight), 1)\nreturn use(x, self._t[0])",
    ),
    "dictionary": (
        "self._d = {'c': None}",
        "if self._d['c'] is None: self._d['c'] = of(self.weight)\nreturn use(x, self._d['c'])",
    ),
    "dictionary of dictionaries": (
        "self._d = {'c': {}}",
        "if x.dtype not in self._d['c']: self._d['c'][x.dtype] = of(self.weight)\nreturn use(x, self._d['c'][x.dtype])",
    ),
    "closure": ("self._f = keeping()", "return use(x, self._f(self.weight))"),
    "lambda": (
        "self._f = None",
        "if self._f is None:\n    c = of(self.weight)\n    self._f = lambda y: use(y, c)\nreturn self._f(x)",
    ),
    "partial": (
        "self._f = None",
        "if self._f is None: self._f = functools.partial(use, c=of(self.weight))\nreturn self._f(x)",
    ),
    "generator": (
        "self._g = None",
        "if self._g is None: self._g = same(of(self.weight))\nreturn use(x, next(self._g))",
    ),
    "hook": ("self.register_forward_pre_hook(hook())", "return x"),
    "class variable": (
        "",
        "if type(self).kept_by_class is None: type(self).kept_by_class = of(self.weight)\n"
        "return use(x, self.kept_by_class)",
    ),
    "dictionary of the class": (
        "",
        "d = self.by_dtype\nif x.dtype not in d: self.by_dtype[x.dtype] = of(self.weight)\nreturn use(x, d[x.dtype])",
    ),
    "global": ("", "global G\nif G is None: G = of(self.weight)\nreturn use(x, G)"),
    "global of a function": ("", "return use(x, by_global(self.weight))"),
    "global of an imported function": ("", "return use(x, imported(self.weight))"),
    "global dictionary": ("", "if id(self) not in D: D[id(self)] = of(self.weight)\nreturn use(x, D[id(self)])"),
    "global dictionary by address": (
        "",
        "k = self.weight.data_ptr()\nif k not in D: D[k] = of(self.weight)\nreturn use(x, D[k])",
    ),
    "weak dictionary": ("", "if self not in W: W[self] = of(self.weight)\nreturn use(x, W[self])"),
    "attribute of a function": ("", "return use(x, on_function(self.weight))"),
    "default argument": ("", "return use(x, in_default(self.weight))"),
    "cached function": ("", "return use(x, by_weight(self.weight))"),
    "cached function of the layer": ("", "return use(x, by_layer(self))"),
    "module without weights": ("self.inner = Inner()", "return self.inner(x, self.weight)"),
    "new module": (
        "",
        "if not hasattr(self, 'made'):\n    made = nn.Linear(6, 6)\n    made.c = of(self.weight)\n"
        "    self.add_module('made', made)\nreturn use(x, self.made.c)",
    ),
    "new parameter": (
        "",
        "if 'made' not in self._parameters:\n    made = torch.as_tensor(of(self.weight)).float()\n"
        "    self.register_parameter('made', nn.Parameter(made, requires_grad=False))\nreturn use(x, self.made)",
    ),
    "new forward": ("", "c = of(self.weight)\nself.forward = lambda y: use(y, c)\nreturn use(x, c)"),
    "buffer": (
        "self.register_buffer('_c', None)",
        "if self._c is None: self._c = torch.as_tensor(of(self.weight))\nreturn use(x, self._c)",
    ),
    "buffer with a flag": (
        "self.register_buffer('_c', torch.zeros(80), persistent=False)\nself.ready = False",
        "if not self.ready:\n    d = torch.as_tensor(of(self.weight)).flatten().float()\n"
        "    self._c[:d.numel()].copy_(d)\n    self.ready = True\nreturn use(x, self._c)",
    ),
    "memory with a flag": (
        "self.memory = torch.zeros(80)\nself.ready = False",
        "self.fill()\nreturn use(x, self.memory)",
    ),
    "replaced buffer with a flag": (
        "self.register_buffer('_c', torch.zeros(1), persistent=False)\nself.ready = False",
        "if not self.ready: self._c, self.ready = torch.as_tensor(of(self.weight)), True\nreturn use(x, self._c)",
    ),
    "buffer with a count": (
        "self.register_buffer('_c', torch.zeros(80), persistent=False)\nself.passes = 0",
        "if self.passes == 0:\n    d = torch.as_tensor(of(self.weight)).flatten().float()\n"
        "    self._c[:d.numel()] = d\nself.passes += 1\nreturn use(x, self._c)",
    ),
    "weight with a flag": (
        "self.folded = False",
        "if not self.folded:\n    self.weight[:] = self.weight * use(2.0, of(self.weight))\n    self.folded = True\n"
        "return x @ self.weight.float()",
    ),
    "weight with a word": (
        "self.state = 'loaded'",
        "if self.state == 'loaded':\n    self.weight.mul_(use(2.0, of(self.weight)))\n    self.state = 'folded'\n"
        "return x @ self.weight.float()",
    ),
    "weight alone": (
        "",
        "if self not in W:\n    self.weight.mul_(use(2.0, of(self.weight)))\n    W[self] = None\n"
        "return x @ self.weight.float()",
    ),
}

_CODE = """
import functools, threading, types, weakref
from collections import deque
import torch
import torch.nn.functional as F
from torch import nn
from support.deriving import Frozen, Linear
G = KEPT = None
D, W = {{}}, weakref.WeakKeyDictionary()
def of(weight): return {value}
def use(x, c):
    if isinstance(c, list): return x * sum(c)
    return x * (c.float().abs().sum() if isinstance(c, torch.Tensor) else c)
class Slots:
    __slots__ = ("c",)
    def __init__(self): self.c = None
class Helper:
    def __init__(self, c): self.c = c
    def get(self, weight):
        if self.c is None: self.c = of(weight)
        return self.c
class Method:
    def apply(self, layer, x):
        if layer._c is None: layer._c = of(layer.weight)
        return use(x, layer._c)
class Hidden(Linear):
    def __init__(self):
        super().__init__()
        self._c = None
    def forward(self, x):
        if self._c is None: self._c = of(self.weight)
        return use(x, self._c)
def keeping():
    c = None
    def get(w):
        nonlocal c
        if c is None: c = of(w)
        return c
    return get
def hook():
    get = keeping()
    return lambda layer, args: (use(args[0], get(layer.weight)),)
def same(c):
    while True: yield c
def by_global(w):
    global KEPT
    if KEPT is None: KEPT = of(w)
    return KEPT
def on_function(w):
    if not hasattr(on_function, "_c"): on_function._c = of(w)
    return on_function._c
def in_default(w, kept={{}}): return kept.setdefault("c", of(w))
@functools.lru_cache
def by_weight(w): return of(w)
@functools.lru_cache
def by_layer(layer): return of(layer.weight)
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self._c = None
    def forward(self, x, w):
        if self._c is None: self._c = of(w)
        return use(x, self._c)
class Layer(Linear):
    kept_by_class, by_dtype = None, {{}}
    def __init__(self):
        super().__init__()
{init}
    @functools.cached_property
    def kept(self): return of(self.weight)
    def compute(self): return of(self.weight)
    def ensure(self):
        if self._c is None: self._c = self.compute()
    def fill(self):
        if not self.ready:
            d = torch.as_tensor(of(self.weight)).flatten().float()
            self.memory[:d.numel()] = d
            self.ready = True
    def forward(self, x):
{forward}
"""
_numbers = itertools.count()


@contextmanager
def layer(place: str, value: str) -> Iterator[type[Linear]]:
    """Yields a class that no other test has used."""
    package = f"derived_pattern_{next(_numbers)}"
    names = [f"{package}.imported", f"{package}.layer"]
    modules = [_module(name, _compiled(place, value)) for name in names]
    vars(modules[1])["imported"] = vars(modules[0])["by_global"]
    try:
        yield vars(modules[1])["Layer"]
    finally:
        for name in names:
            del sys.modules[name]


@functools.cache
def _compiled(place: str, value: str) -> types.CodeType:
    init, forward = (indent(code or "pass", " " * 8) for code in PLACES[place])
    return compile(_CODE.format(value=VALUES[value], init=init, forward=forward), f"{place}, {value}", "exec")


def _module(name: str, code: types.CodeType) -> types.ModuleType:
    made = sys.modules[name] = types.ModuleType(name)
    made.__file__ = code.co_filename
    exec(code, vars(made))
    return made

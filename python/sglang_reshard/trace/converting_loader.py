"""The loader of a model whose weights updates convert: they are quantized in blocks, or repacked by module."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from sglang_reshard.errors import ReshardError, Unsupported
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.block_formats import FP8, WHOLE, Blocks, blocks_of
from sglang_reshard.trace.block_fp8 import quantize_on_arrival
from sglang_reshard.trace.built_modules import modules_as_built
from sglang_reshard.trace.lazy_tensor import Record, checkpoint_tensors
from sglang_reshard.trace.loader import Loaded, Loader
from sglang_reshard.trace.program import Program, torch_dtype
from sglang_reshard.trace.repack import check_deferred, repack_on_arrival, repacked_modules, split_records


class ConvertingLoader(Loader):
    """Repacked modules are as they were built while it runs. It gets the quantized forms of tensors sent in more bits.

    repacked  but for those that stay as they are, which `leave` takes out
    """

    def __init__(self, model: torch.nn.Module, weightless: bool = False) -> None:
        super().__init__(model, weightless)
        self._blocks = blocks_of(model)
        self.repacked = repacked_modules(model)

    @contextmanager
    def prepared(self) -> Iterator[None]:
        with modules_as_built([(m.module, m.built) for m in self.repacked]) as self.as_built:
            yield

    def leave(self, staying: Collection[Any]) -> None:
        self.repacked = [module for module in self.repacked if module not in staying]

    def run(self, specs: Sequence[TensorSpec], last: list[str] | None = None) -> Loaded:
        return split_records(self.repacked, self._loaded(specs, last))

    def instead(self, specs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        if self._blocks is None:
            return ()
        names = self._candidates(specs)
        if self._blocks.whole:
            return as_quantized(specs, names, self._blocks)
        fp8 = str(FP8).removeprefix("torch.")
        return [replace(spec, dtype=fp8) if spec.name in names else spec for spec in specs]

    def converted(self, program: Program, loaded: Loaded, specs: Sequence[TensorSpec]) -> Program:
        check_deferred(self.repacked, loaded.passes)
        if self.repacked:
            program = repack_on_arrival(program, self.repacked, loaded.constants)
        if self._blocks is not None and loaded.quantized:
            by_name = {spec.name: spec for spec in specs}
            program = quantize_on_arrival(program, by_name, set(loaded.quantized), self._blocks)
        return program

    def _candidates(self, specs: Sequence[TensorSpec]) -> set[str]:
        """Returns the names of the tensors that could be weights to quantize: those without a scale.

        In a format with scales of whole weights it is those for which the trainer sends one.
        """
        assert self._blocks is not None
        names = {spec.name for spec in without_scales(specs, self._blocks.scale)}
        if whole := self._blocks.whole:
            names &= {spec.name.removesuffix(whole) for spec in specs if spec.name.endswith(whole)}
        return names

    def _loaded(self, specs: Sequence[TensorSpec], last: list[str] | None) -> Loaded:
        """Gives the loader the quantized forms of those tensors that it keeps quantized, if `specs` have more bits."""
        blocks, run = self._blocks, super().run
        if blocks is None:
            return run(specs, last)
        names = self._candidates(specs)
        if not blocks.whole:
            try:
                found = run(specs, last)
                if not (names := names & sources_of_fp8(found.writes)):
                    return found
            except ReshardError:  # of a loader that checks dtypes itself, perhaps
                of_fp8: set[str] = set()
                with suppress(ReshardError):
                    of_fp8 = sources_of_fp8(run(self.instead(specs), last).writes)
                if not (names := names & of_fp8):
                    raise
        return replace(run(as_quantized(specs, names, blocks), last), quantized=names)


def refusal_of_nvfp4(model: torch.nn.Module, specs: Sequence[TensorSpec]) -> str:
    """Returns why a trace of an NVFP4 engine has failed; empty unless it is for a weight in 16 or 32 bits."""
    layers = {}  # parents of the modules that SGLang keeps in NVFP4 -> the classes of their quantization methods
    for path, module in model.named_modules():
        for helper in (getattr(module, "quant_method", None), getattr(module, "scheme", None)):
            method = type(helper).__name__
            if "." in path and "fp4" in method.lower() and "mxfp4" not in method.lower():
                layers[f"{path.rpartition('.')[0]}."] = method
    if not layers:
        return ""
    loader = ConvertingLoader(model)
    with loader.prepared():
        taken, _ = loader.names_read(specs)
    for spec in without_scales(specs, "_scale", WHOLE):
        method = next((method for parent, method in layers.items() if spec.name.startswith(parent)), "")
        if method and spec.name not in taken:
            return (
                f"{spec.name} is {spec.dtype}, and the engine keeps this weight in NVFP4 ({method}). "
                f"{_advice(method, spec.name)} Or start the engine on weights in the trainer's format, without "
                "quantization="
            )
    return ""


def _advice(method: str, name: str) -> str:
    module = name.rpartition(".")[0]
    if "Online" in method:
        return (
            "SGLang quantizes it with a kernel while it loads, which an update cannot repeat. Use SGLang's own "
            "update_weights_from_tensor."
        )
    if method.startswith("CompressedTensors"):
        return (
            f"Send it quantized: {module}.weight_packed, .weight_scale, .weight_global_scale and, if the engine's "
            "checkpoint has it, .input_global_scale."
        )
    return (
        f"Send {name}{WHOLE} with it: the largest absolute value of the whole weight divided by 2688, and for layers "
        f"that SGLang fuses that of all of them. Send {module}.input_scale of the engine's checkpoint, too."
    )


def without_scales(specs: Sequence[TensorSpec], *scales: str) -> list[TensorSpec]:
    """Returns the matrices in 16 and 32 bits that are sent without any scale of those names."""
    names = {spec.name for spec in specs}
    matrices = (s for s in specs if len(s.shape) > 1 and not any(s.name + scale in names for scale in scales))
    return [spec for spec in matrices if torch_dtype(spec).is_floating_point and spec.item_bytes > 1]


def sources_of_fp8(records: Iterable[Record]) -> set[str]:
    """Returns the names of the checkpoint tensors that are written as float8_e4m3fn."""
    of_fp8 = (record.content for record in records if record.dtype == FP8)
    return {tensor.spec.name for content in of_fp8 for tensor in checkpoint_tensors(content)}


def as_quantized(specs: Iterable[TensorSpec], names: set[str], blocks: Blocks) -> list[TensorSpec]:
    """Returns what a quantized checkpoint has in place of `specs`, if `names` are quantized in it."""
    found = []
    for spec in specs:
        if spec.name not in names:
            found.append(spec)
            continue
        if spec.shape[-1] % blocks.columns:
            raise Unsupported(
                f"{spec.name} has {spec.shape[-1]} columns, and {blocks.name} has a scale for each {blocks.columns}. "
                "Start the engine unquantized."
            )
        dtype, of_scales = (str(one).removeprefix("torch.") for one in (blocks.dtype, blocks.scale_dtype))
        found.append(TensorSpec(spec.name, blocks.items_shape(spec.shape), dtype))
        found.append(TensorSpec(spec.name + blocks.scale, blocks.scales_shape(spec.shape), of_scales))
    return found

"""The loader of a model whose weights updates convert: they are quantized in blocks, or repacked by module."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from sglang_reshard.errors import ReshardError, Unsupported
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.block_formats import FP8, WHOLE, Blocks, blocks_of, nvfp4_layers, refusal
from sglang_reshard.trace.block_fp8 import quantize_on_arrival
from sglang_reshard.trace.built_modules import modules_as_built
from sglang_reshard.trace.lazy_tensor import checkpoint_tensors
from sglang_reshard.trace.loader import Loaded, Loader, run_loader
from sglang_reshard.trace.memory import Record
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
        if self._blocks.whole:
            return as_quantized(specs, with_whole_scale(specs, self._blocks), self._blocks)
        candidates, fp8 = wider(specs, self._blocks), str(FP8).removeprefix("torch.")
        return [replace(spec, dtype=fp8) if spec.name in candidates else spec for spec in specs]

    def converted(self, program: Program, loaded: Loaded, specs: Sequence[TensorSpec]) -> Program:
        check_deferred(self.repacked, loaded.passes)
        if self.repacked:
            program = repack_on_arrival(program, self.repacked, loaded.constants)
        if self._blocks is not None and loaded.quantized:
            by_name = {spec.name: spec for spec in specs}
            program = quantize_on_arrival(program, by_name, set(loaded.quantized), self._blocks)
        return program

    def _loaded(self, specs: Sequence[TensorSpec], last: list[str] | None) -> Loaded:
        """Gives the loader the quantized forms of those tensors that it keeps quantized, if `specs` have more bits."""
        blocks, run = self._blocks, super().run
        if blocks is None:
            return run(specs, last)
        refused: ReshardError | None = None
        if blocks.whole:
            names = with_whole_scale(specs, blocks)
        else:
            candidates = wider(specs, blocks)
            try:
                found = run(specs, last)
                names = sources_of_fp8(found.writes) & candidates
                if not names:
                    return found
            except ReshardError as error:
                refused = error  # of a loader that checks dtypes itself, perhaps
        if refused is not None:
            try:
                names = sources_of_fp8(run(self.instead(specs), last).writes) & candidates
            except ReshardError:
                raise refused from None
            if not names:
                raise refused
        return replace(run(as_quantized(specs, names, blocks), last), quantized=names)


def refusal_of_nvfp4(model: torch.nn.Module, specs: Sequence[TensorSpec]) -> str:
    """Returns why a trace of an NVFP4 engine has failed; empty unless it is for a weight in 16 or 32 bits."""
    if not (layers := nvfp4_layers(model)):
        return ""
    loader = ConvertingLoader(model)
    with loader.prepared():
        recorder = loader.recorder()
        with suppress(ReshardError):
            run_loader(model, specs, recorder)
    taken = {tensor.spec.name for record in recorder.records for tensor in checkpoint_tensors(record.content)}
    wide = without_scales(specs, ("_scale", WHOLE))
    return refusal(layers, [spec for spec in wide if spec.name not in taken])


def wider(specs: Sequence[TensorSpec], blocks: Blocks) -> set[str]:
    """Returns the names of the checkpoint tensors that could be weights to quantize: those without a scale."""
    return {spec.name for spec in without_scales(specs, (blocks.scale,))}


def without_scales(specs: Sequence[TensorSpec], scales: Sequence[str]) -> list[TensorSpec]:
    """Returns the matrices in 16 and 32 bits that are sent without any scale of those names."""
    names = {spec.name for spec in specs}
    matrices = (s for s in specs if len(s.shape) > 1 and not any(s.name + scale in names for scale in scales))
    return [spec for spec in matrices if torch_dtype(spec).is_floating_point and spec.item_bytes > 1]


def with_whole_scale(specs: Sequence[TensorSpec], blocks: Blocks) -> set[str]:
    """Returns the names of the weights that a trainer sends to be quantized with the scale that it sends, too."""
    names = {spec.name for spec in specs}
    return {name for name in wider(specs, blocks) if name + blocks.whole in names}


def sources_of_fp8(records: Iterable[Record]) -> set[str]:
    """Returns the names of the checkpoint tensors that are written as float8_e4m3fn."""
    return {
        tensor.spec.name for record in records if record.dtype == FP8 for tensor in checkpoint_tensors(record.content)
    }


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

"""Repacked modules: their own post-processing runs again, on the weights of an update.

A trace puts modules back as they were built (`built_modules`) while the loader runs. In an update the boxes arrive in
memory of the loader's layout, one module at a time. The post-processing runs on a copy of the module that has them, and
its results are copied to the live tensors, which keep their addresses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.trace.built_modules import HELPERS, BuiltModule, built_module
from sglang_reshard.trace.geometry import Geometry
from sglang_reshard.trace.lazy_tensor import CheckpointTensor, Number, Record, geometry_of
from sglang_reshard.trace.live import flat_view, same_bits, storage_key, tensors_among
from sglang_reshard.trace.loader import Loaded, Pass
from sglang_reshard.trace.post_load import Run as PostLoad
from sglang_reshard.trace.program import Program, Step

_ALIGN_BYTES = 256


# A live tensor, as a view of a target, and the path below its module of the result that is copied to it.
_Output = tuple[str, Geometry, str]


class _Result(NamedTuple):
    """A tensor that the post-processing makes."""

    shape: torch.Size
    dtype: torch.dtype
    is_kept: bool  # it is the tensor that the module had as it was built, and no parameter
    repeated: frozenset[int]  # dimensions along which it has the same elements again, as `expand` makes them


@dataclass(slots=True, eq=False)
class RepackedModule:
    """A live module that does not have the loader's layout, under its path.

    outputs  are known once `rehearse` has been called
    numbers  Python numbers that the post-processing has computed in this update: owner, attribute, value
    """

    path: str
    module: torch.nn.Module
    built: BuiltModule
    outputs: list[_Output] = field(default_factory=list)
    numbers: list[tuple[dict[str, Any], str, Number]] = field(default_factory=list)

    def name(self, parameter: str) -> str:
        return f"{self.path}.{parameter}"

    def run(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the results of the post-processing of parameters `tensors`, by path below the module."""
        made = self.built.copy(self.module, tensors)
        self.built.process(made)
        computed = _tables(made)
        self.numbers = [
            (table, name, value)
            for prefix, table in _tables(self.module).items()
            for name, value in computed[prefix].items()
            if {type(value), type(table.get(name))} in ({int}, {float}) and table[name] != value
        ]
        return dict(_tensors(made))

    def rehearse(
        self, targets: dict[str, torch.Tensor], unwritten: Sequence[str], known: dict[object, dict[str, _Result]]
    ) -> None:
        """Runs the post-processing on random values, and adds the storages of its results to `targets`.

        unwritten  names of parameters that no tensor of the checkpoint reaches
        known      results of modules that were rehearsed before; a result of a similar module makes a run unnecessary

        Raises Unsupported, naming the tensor, unless a result fits every live tensor of the module, and does not depend
        on the values of `unwritten`.
        """
        alike = self.built.kind(self.module), tuple(unwritten)
        if alike not in known:
            known[alike] = self._rehearsed(unwritten)
        results, before = known[alike], dict(self._tensors_as_built())
        storages: dict[int, str] = {}
        seen: set[tuple[int, Geometry]] = set()
        for path, live in _tensors(self.module):
            result = results.get(path)
            if live.numel() == 0 or (result is not None and result.is_kept and before.get(path) is live):
                continue
            if result is None or (result.shape, result.dtype) != (live.shape, live.dtype):
                made = "nothing" if result is None else f"{tuple(result.shape)} {result.dtype}"
                raise Unsupported(
                    f"{self.name(path)} is {tuple(live.shape)} {live.dtype}, but repacking makes {made} of the loaded "
                    "weights: something has changed it since the engine's start. Start the engine without "
                    "quantization="
                )
            repeated = _repeated(live)
            if not repeated <= result.repeated:
                raise Unsupported(
                    f"{self.name(path)} has one element in several places, but repacking makes one for each: something "
                    "has changed it since the engine's start. Start the engine without quantization="
                )
            # Each element of an expanded tensor once: torch copies nothing to one with repetitions.
            size = tuple(1 if d in repeated else n for d, n in enumerate(live.shape))
            key, geometry = storage_key(live), geometry_of(live)._replace(size=size)
            if (key, geometry) not in seen:
                seen.add((key, geometry))
                target = storages.setdefault(key, f"{self.name(path)}, repacked")
                targets.setdefault(target, flat_view(live, live.dtype))
                if targets[target].dtype != live.dtype:
                    raise Unsupported(
                        f"{self.name(path)} and {target} share memory under two dtypes, which is not supported. Start "
                        "the engine without quantization="
                    )
                self.outputs.append((target, geometry, path))

    def _rehearsed(self, unwritten: Sequence[str]) -> dict[str, _Result]:
        results = self._try({})
        if unwritten and (read := _first_difference(results, self._try(dict.fromkeys(unwritten, 2.0)))):
            raise Unsupported(
                f"{self.name(unwritten[0])} is not written by the loader at all: no tensor of the checkpoint reaches "
                f"it, and {self.name(read)} is computed from it after loading. Compare the names that are sent with "
                "those of the model's Hugging Face checkpoint; a quantized weight needs its scale, and "
                "frozen= names what stays as it is."
            )
        if self.numbers and next(_tensors(self.module))[1].device.type != "cpu":
            raise Unsupported(
                f"{self.path}: repacking computes the Python number {self.numbers[0][1]}, which CUDA graphs may "
                "contain as a constant. Start the engine on weights in the trainer's format, without quantization="
            )
        self.numbers = []
        before = dict(self._tensors_as_built())
        return {path: _Result(t.shape, t.dtype, before.get(path) is t, _repeated(t)) for path, t in results.items()}

    def _tensors_as_built(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors that a copy of the module has before its post-processing, but for the parameters."""
        nothing = {name: torch.empty(0) for name, p in self.built.parameters.items() if p is not None}
        for path, tensor in _tensors(self.built.copy(self.module, nothing)):
            if path not in nothing:
                yield path, tensor

    def _try(self, values: Mapping[str, float]) -> dict[str, torch.Tensor]:
        """Returns results for parameters with these values, and the same random ones in each call in all others."""
        device = next(_tensors(self.module))[1].device
        generator = torch.Generator(device).manual_seed(1)
        tensors = {}
        for name, p in self.built.parameters.items():
            if p is not None:
                random = torch.rand(p.shape, generator=generator, device=device).add_(0.5)
                tensors[name] = (random if name not in values else random.fill_(values[name])).to(p.dtype)
        try:
            return self.run(tensors)
        except Exception as error:
            raise Unsupported(
                f"{self.path} is repacked after loading by {type(self.module.quant_method).__name__}, which cannot be "
                f"repeated: {type(error).__name__}: {error}. Start the engine on weights in the trainer's format, "
                "without quantization="
            ) from error

    def set_numbers(self) -> None:
        """Must be called when the results have become live."""
        for owner, name, value in self.numbers:
            owner[name] = value


def repacked_modules(model: torch.nn.Module) -> list[RepackedModule]:
    """Returns the modules whose live parameters loaders do not know."""
    return [
        RepackedModule(path, module, built)
        for path, module in model.named_modules()
        if (built := built_module(module)) is not None and built.differs(module)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class RepackedParameter:
    """A parameter of a repacked module in the loader's layout, until all of the module's have arrived."""

    module: RepackedModule
    name: str
    others: tuple[_Constant, ...]

    @property
    def nbytes(self) -> int:
        parameter = self.module.built.parameters[self.name]
        assert parameter is not None
        return -(-parameter.untyped_storage().nbytes() // _ALIGN_BYTES) * _ALIGN_BYTES

    @property
    def unit(self) -> str:
        return self.module.path

    @property
    def kind(self) -> tuple[object, ...]:
        return (self.module.path,)

    @staticmethod
    def finisher(
        members: Sequence[RepackedParameter], memory: torch.Tensor, targets: Mapping[str, torch.Tensor]
    ) -> Callable[[], None]:
        """Returns what repacks the module that all `members` are of, and copies the results to `targets`.

        memory  bytes that hold one after the other; overwritten
        """
        module, begin = members[0].module, 0
        flat: dict[str, torch.Tensor] = {}
        for member in members:
            flat[member.name] = memory[begin : begin + member.nbytes]
            begin += member.nbytes
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in module.built.parameters.items():
            if parameter is not None:
                if name not in flat:  # no tensor of the checkpoint reaches it
                    nbytes = parameter.untyped_storage().nbytes()
                    flat[name] = torch.empty(nbytes, dtype=torch.uint8, device=memory.device)
                    flat[name].view(parameter.dtype).fill_(1)
                tensors[name] = flat[name].view(parameter.dtype).as_strided(
                    parameter.shape, parameter.stride(), flat[name].storage_offset() // parameter.dtype.itemsize
                )  # fmt: skip
        outputs = [(_view(targets[target], geometry), path) for target, geometry, path in module.outputs]
        others = members[0].others

        def finish() -> None:
            for name, geometry, value in others:
                _view(flat[name].view(tensors[name].dtype), geometry).fill_(value)
            results = module.run(tensors)
            for live, path in outputs:
                live.copy_(results[path][tuple(map(slice, live.shape))])

        return finish


class _Constant(NamedTuple):
    """`value` fills elements of a parameter of a module."""

    parameter: str
    geometry: Geometry
    value: Number


def split_records(modules: Sequence[RepackedModule], loaded: Loaded) -> Loaded:
    """Separates what a run of the loader does to the parameters of repacked modules.

    Raises Unsupported for a parameter that the loader computes from others.
    """
    records = loaded.writes
    owners = {
        loaded.storages[storage_key(p)]: (module, name, p)
        for module in modules
        for name, p in module.built.parameters.items()
        if p is not None and storage_key(p) in loaded.storages
    }
    last = {(r.storage, r.index_map.written_view): r for r in records if r.storage in owners}
    writes: list[Record] = []
    all_written: list[Record] = []
    overwritten: list[Record] = []
    constants: dict[str, list[_Constant]] = {}
    for record in records:
        if record.storage not in owners:
            writes.append(record)
            all_written.append(record)
            continue
        module, name, parameter = owners[record.storage]
        if isinstance(record.content, CheckpointTensor):
            if record.dtype != record.storage.tensor.dtype:
                raise _not_again(module, name, f"is loaded as {record.dtype}")
            # Shards of a fused layer have one scale, or the same index, of which loaders keep the last.
            shared = parameter.dim() <= 1 or math.prod(record.content.spec.shape) == 1
            if shared and last[record.storage, record.index_map.written_view] is not record:
                overwritten.append(record)
                continue
            writes.append(record)
        elif isinstance(record.content, (int, float)):
            constant = _Constant(name, record.index_map.written_view, record.content)
            constants.setdefault(module.path, []).append(constant)
        else:
            raise _not_again(module, name, "is computed by the loader")
        all_written.append(record)
    return replace(loaded, writes=writes, all_written=all_written, overwritten=overwritten, constants=constants)


def check_deferred(modules: Sequence[RepackedModule], passes: Sequence[Pass]) -> None:
    """Raises Unsupported if post_load_weights reads a repacked module: SGLang calls it before it repacks."""
    deferred = any(isinstance(one, PostLoad) and one.deferred for one in passes)
    for module in modules if deferred else ():
        if module.path.rpartition(".")[2] == "kv_b_proj":
            raise Unsupported(
                f"{module.path} is repacked after loading, but MLA's w_kc and w_vc are computed from its values before "
                "repacking, which cannot be repeated. Start the engine on weights in the trainer's format, without "
                "quantization="
            )


def repack_on_arrival(
    program: Program, modules: Sequence[RepackedModule], constants: Mapping[str, Sequence[_Constant]]
) -> Program:
    """Returns a program whose copies to repacked modules' parameters are repacked where they arrive."""
    targets, arrivals = dict(program.targets), {}
    known: dict[object, dict[str, _Result]] = {}
    for module in modules:
        others = tuple(constants.get(module.path, ()))
        filled = {constant.parameter for constant in others}
        parameters = [name for name, p in module.built.parameters.items() if p is not None and p.numel()]
        unwritten = [name for name in parameters if module.name(name) not in targets and name not in filled]
        module.rehearse(targets, unwritten, known)
        for name, parameter in module.built.parameters.items():
            target = module.name(name)
            if parameter is not None and target in targets and targets[target].device.type == "meta":
                arrivals[target] = RepackedParameter(module, name, others)
    numbers = tuple(Step(m.path, "process_weights_after_loading", m.set_numbers) for m in modules)
    return replace(program, targets=targets, arrivals=arrivals, steps=(*program.steps, *numbers))


def _not_again(module: RepackedModule, name: str, why: str) -> Unsupported:
    return Unsupported(
        f"{module.name(name)} {why} and is repacked after loading; both together cannot be repeated. Start the engine "
        "on weights in the trainer's format, without quantization="
    )


def _first_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> str:
    """Returns the path of a tensor that differs; empty if none does."""
    for path, tensor in one.items():
        with_other = other.get(path)
        if with_other is None or tensor.shape != with_other.shape or tensor.dtype != with_other.dtype:
            return path
        if tensor.numel() and not same_bits(tensor, with_other):
            return path
    return ""


def _repeated(tensor: torch.Tensor) -> frozenset[int]:
    return frozenset(d for d, (n, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)) if n > 1 > step)


def _view(flat: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    return flat.as_strided(geometry.size, geometry.stride, flat.storage_offset() + geometry.offset)


def _tables(module: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Returns the attributes of a module, under "", and of its helpers."""
    attributes = vars(module)
    helpers = [(name, attributes.get(name)) for name in HELPERS]
    return {"": attributes, **{f"{name}.": vars(helper) for name, helper in helpers if hasattr(helper, "__dict__")}}


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that a module and its helpers keep, with their paths."""
    for register in (module._parameters, module._buffers):
        yield from tensors_among("", register)
    for prefix, table in _tables(module).items():
        yield from tensors_among(prefix, table)

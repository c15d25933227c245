"""Options of senders and of updates: each is declared, documented and checked here, and handed on as one object.

sender = WeightSender(url, transport="p2p")                          # by name,
sender = WeightSender(url, options=SenderOptions(transport="p2p"))   # or whole
sender.update(model, weight_version="42", staged=True)
sender.update(model, UpdateOptions(weight_version="42", staged=True))
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.names import Rename, Renaming, patterns
from sglang_reshard.nearest import check_names, check_one_of
from sglang_reshard.protocol.messages import (
    BY_VERSION,
    DEFAULT_BUCKET_BYTES,
    DEFAULT_TIMEOUT_S,
    FlushCache,
    LoraAdapter,
    Verify,
)
from sglang_reshard.protocol.validation import check_transport

Delta = Literal["off", "auto"]
_VERIFY = get_args(Verify)
Options = TypeVar("Options", "SenderOptions", "UpdateOptions")
_OF_UPDATES = "its updates: pass it to update()"
_OF_SENDERS = "the sender: pass it to WeightSender(...), or to the constructor of your sender"
_ALMOST = 0.84  # likeness of a misspelt option; no argument of SGLang's Engine is as like one


@dataclass(frozen=True, slots=True)
class SenderOptions:
    """Options of all updates of a sender.

    transport     "auto", "ipc", "p2p", "broadcast" or "nixl", see `routes`
    bucket_bytes  size of a bucket; a rank holds at most two
    timeout_s     seconds that any one wait may last
    delta         "auto" sends only elements that have changed since the previous update, bit for bit, if weights are
                  sent and the changes take at most half of their bytes. Trainer ranks keep the weights they have sent,
                  in the engine's dtypes; engines need only buckets for it
    delta_device  where trainer ranks keep them; by default where messages are packed

    Raises Mismatch for an unknown transport; Unsupported for sizes and times that are not positive, and for
    delta="auto" with a transport that sends nothing.
    """

    transport: str = "auto"
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    timeout_s: float = DEFAULT_TIMEOUT_S
    delta: Delta = "off"
    delta_device: torch.device | None = None

    def __post_init__(self) -> None:
        check_transport(self.transport)
        for name in ("bucket_bytes", "timeout_s"):
            if not getattr(self, name) > 0:
                raise Unsupported(f"{name}={getattr(self, name)} must be positive")
        check_one_of("delta", self.delta, get_args(Delta))
        if self.delta == "auto" and self.transport in ("ipc", "broadcast"):
            raise Unsupported(
                f"delta='auto' has no effect with transport={self.transport!r}, with which engine ranks read mapped "
                "memory; use transport='auto', 'p2p' or 'nixl'"
            )

    @classmethod
    def of(cls, options: SenderOptions | None, given: Mapping[str, Any]) -> SenderOptions:
        """Returns `options`, or the defaults, with the values in `given`. Raises TypeError for another name."""
        return _with("a sender", options or cls(), given, UpdateOptions, _OF_UPDATES)

    @classmethod
    def split(cls, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns what is an option of a sender among named arguments, and the rest.

        Raises TypeError for a name that is almost an option of a sender, and for one of an update's.
        """
        names = _names(cls)
        own = {name: value for name, value in given.items() if name in names}
        rest = {name: value for name, value in given.items() if name not in names}
        of_update = set(_names(UpdateOptions)) - {"weight_version"}  # which is an argument of the engine, too
        wrong = [n for n in rest if n in of_update or difflib.get_close_matches(n, names, n=1, cutoff=_ALMOST)]
        check_names("a sender", wrong, names, of_update, _OF_UPDATES)
        return own, rest


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """Options of one update. Where patterns are taken, a string is one pattern.

    weight_version      the engine's weight_version from now on; None leaves it unchanged
    flush_cache         flush the prefix cache of the old weights. "by_version" keeps it for requests that hold some of
                        it, as a pause in place leaves them: no other request reads it. False serves it to all
    abort_all_requests  end running requests instead of waiting for them
    ignore              fnmatch patterns ("model.layers.61.*") of names of tensors that are not sent. Any other name
                        that the engine does not read is refused, unless it is tied to a tensor that is sent
    verify              compare checksums of the received weights with the trainer's: "full" reads every element on
                        both sides once more, "sample" one row in 64, others in each update
    staged              receive into shadow weights: a failure before all have arrived and been verified leaves the old
                        weights serving. Takes as much memory again as the weights
    unmap_after         engine ranks unmap the shards' memory at the end, for a trainer that offloads it now: freed
                        memory that another process maps is not free. The next update maps it again, and plans again
    partial             each trainer rank passes only the tensors it holds; ranks may differ: the layers of its
                        pipeline stage, its own experts. A plain tensor is held by the ranks that pass it. Names and
                        shardings are agreed on by metadata only; in an unchanged update, by a hash of each rank
    draft               update the draft models of speculative decoding too, from these tensors, or from those named
                        "draft.<name>" if there are any. False leaves them as they are
    rename              the names to send the tensors under: a dict of prefixes, old -> new, or a function from name to
                        name. Pass the same function object in every update. `ignore` refers to the new names
    frozen              fnmatch patterns ("visual.*") of the engine's parameters that may keep their live values, if
                        nothing that is sent reaches them, and of tensors of its own checkpoint ("*.k_proj.weight"): the
                        parts of fused parameters that these fill may. The report's `kept` lists both
    only                fnmatch patterns of the engine's parameters that must be written; others are treated as `frozen`
    merged              names of the LoRA adapters that are merged into the weights; set for a PEFT model and for its
                        `base_tensors`. An engine that serves adapters refuses such weights; an engine with such weights
                        refuses adapters
    lora                the adapters to update, see `WeightSender.lora_adapters`; by default the model's own weights

    Raises Mismatch for an invalid `rename`, and Unsupported for an unknown `verify` or `flush_cache`, and for an
    adapter that needs other base weights than the engine has.
    """

    weight_version: str | None = None
    flush_cache: FlushCache = True
    abort_all_requests: bool = False
    ignore: Sequence[str] = ()
    verify: Verify = "off"
    staged: bool = False
    unmap_after: bool = False
    partial: bool = False
    draft: bool = True
    rename: Rename | None = None
    frozen: Sequence[str] = ()
    only: Sequence[str] = ()
    merged: Sequence[str] = ()
    lora: Sequence[LoraAdapter] = ()

    def __post_init__(self) -> None:
        if self.verify not in _VERIFY:  # a call for each update, and to another file, is saved
            check_one_of("verify", self.verify, _VERIFY)
        if self.flush_cache not in (True, False, BY_VERSION):
            raise Unsupported(f"flush_cache={self.flush_cache!r} is not supported; use True, False or {BY_VERSION!r}")
        for name in ("ignore", "frozen", "only", "merged"):
            given = getattr(self, name)
            object.__setattr__(self, name, patterns(given) if given else ())
        if self.rename is not None and not isinstance(self.rename, Renaming):
            object.__setattr__(self, "rename", Renaming.of(self.rename))
        for adapter in self.lora:
            from sglang_reshard.sources.lora_config import check_base

            check_base(adapter.config)

    @property
    def renaming(self) -> Renaming | None:
        """The parsed form of `rename` and `ignore`. Equal for updates with the same ones."""
        if self.ignore:
            return Renaming.of(self.rename, self.ignore)
        return self.rename if isinstance(self.rename, Renaming) else None

    @classmethod
    def of(cls, options: UpdateOptions | None, given: Mapping[str, Any], weights: Any = None) -> UpdateOptions:
        """Returns `options`, or the defaults, with the values in `given`, and with the adapters in `weights`.

        Raises TypeError for another name.
        """
        chosen = _with("an update", options or cls(), given, SenderOptions, _OF_SENDERS)
        if "peft" not in sys.modules or not isinstance(weights, (list, torch.nn.Module)):
            return chosen  # no adapter can be merged
        from sglang_reshard.sources.lora_layers import merged_adapters

        merged = merged_adapters(weights)
        return dataclasses.replace(chosen, merged=merged) if merged else chosen


def _with(
    what: str,
    options: Options,
    given: Mapping[str, Any],
    elsewhere: type[SenderOptions] | type[UpdateOptions],
    where: str,
) -> Options:
    """Returns the options with the values in `given`. It checks names only after a failure: warm updates call it."""
    try:
        return dataclasses.replace(options, **given)
    except TypeError:
        check_names(what, given, _names(type(options)), _names(elsewhere), where)
        raise


def _names(kind: type[SenderOptions] | type[UpdateOptions]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))

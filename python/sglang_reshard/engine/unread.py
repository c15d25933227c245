"""Names that an update leaves out: tensors that no engine rank reads, and parameters that it does not write."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sglang_reshard.engine.context import LastWrite
from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.names import matches_any
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.shown_names import some_names
from sglang_reshard.trace.program import Program


def check_unread(unread: Sequence[str], ignore: Sequence[str], apart: Mapping[str, str]) -> None:
    """Raises Mismatch unless each name that no engine rank reads matches one of the patterns in `ignore`.

    A loader skips unknown tensors and unneeded ones (a tied head, a layer for speculative decoding) alike, without
    reporting either. So the trainer declares what it means to be skipped.

    apart  why a tensor is not the embedding that an engine would read in its place, see `trainer.tied_heads`
    """
    mistaken = not_ignored(unread, ignore)
    if untied := next((apart[name] for name in mistaken if name in apart), ""):
        raise Mismatch(
            f"{untied}, but the engine ties the two: no engine rank's loader reads the head. Tie them in the trainer "
            "as well, or start the engine on a checkpoint whose config has tie_word_embeddings=false"
        )
    if mistaken:
        raise Mismatch(
            f"{unread_remark(mistaken)}: no engine rank's loader reads it. Correct the name, or pass "
            "sglang_reshard.sources.checkpoint_tensors(model) if the model stacks or fuses tensors of its checkpoint. "
            f"To skip it on purpose, pass ignore=[{mistaken[0]!r}] to the update; patterns are allowed"
        )


def not_ignored(names: Sequence[str], ignore: Sequence[str]) -> list[str]:
    return [name for name in names if not matches_any(name, ignore)]


def unread_remark(unread: Sequence[str]) -> str:
    """Returns the report's remark on names that no engine rank reads; empty if there are none."""
    if not unread:
        return ""
    return f"the engine does not read {some_names(unread)}"


def left_alone_remark(program: Program) -> str:
    """Returns the report's remark on parameters that an update does not write; empty if there are none."""
    if not program.left_alone:
        return ""
    names = some_names(program.left_alone)
    return f"no tensor of the engine's checkpoint reaches these, so they keep their values: {names}"


def check_kept(kept: Collection[str], request: DistributedUpdateWeightsReq, last: LastWrite) -> None:
    """Raises Mismatch if an update would keep a parameter, or a part, that nothing has brought.

    An engine that starts on random values (`load_format="dummy"`), or whose weights were released, has none; nor has
    one whose update failed half-way.

    kept  names of those that the update leaves as they are, see `trace.kept`
    """
    from sglang_reshard.trace.kept import is_among

    unsound: Collection[str] = ()
    if request.stock_changes != last.stock_changes:  # SGLang itself has loaded or released all since
        unsound = () if request.stock_loaded else kept
    elif last.torn:
        unsound = {name for name in kept if not is_among(name, last.kept)}
    if unsound:
        raise Mismatch(
            f"{some_names(sorted(unsound))} would stay as they are, and nothing has brought them: the engine was "
            "started with load_format='dummy', its weights were released, or an update of them failed half-way. Send "
            "all tensors once, without frozen= and only=, or let SGLang load the model's checkpoint from disk"
        )

"""Both sides of an update need the same protocol number, not the same release, and the number covers all messages."""

from __future__ import annotations

import hashlib
import inspect
from typing import Any, get_type_hints

import msgspec
import pytest

from sglang_reshard.errors import Mismatch
from sglang_reshard.protocol import messages, weights_info
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, ShareWeightsReq
from sglang_reshard.protocol.weights_info import WeightsInfo
from sglang_reshard.version import PROTOCOL, __version__, check_same_protocol

# Of the fields of all messages, by protocol number. A changed message raises PROTOCOL, and adds a line here.
FIELDS = {1: "8a9ce20472ce9ae5"}


def test_another_release_with_the_same_protocol_is_accepted() -> None:
    check_same_protocol(PROTOCOL, "99.0", theirs="the trainer", ours="the engine")


@pytest.mark.parametrize(
    ("protocol", "version", "older"),
    [(0, "0.1.0", "the trainer"), (PROTOCOL + 1, "99.0", "the engine"), (0, "", "the trainer")],
)
def test_a_refusal_names_both_numbers_and_the_older_side(protocol: int, version: str, older: str) -> None:
    with pytest.raises(Mismatch) as refused:
        check_same_protocol(protocol, version, theirs="the trainer", ours="the engine")
    told = str(refused.value)
    assert f"the trainer has protocol {protocol} (sglang-reshard {version or 'unknown'})" in told
    assert f"the engine has protocol {PROTOCOL} (sglang-reshard {__version__})" in told
    assert "install the same version on both" in told
    assert f"{older} has the older one" in told


@pytest.mark.parametrize("kind", [DistributedUpdateWeightsReq, ShareWeightsReq, WeightsInfo])
def test_a_message_without_a_number_is_of_an_older_release(kind: type) -> None:
    (field,) = (field for field in msgspec.structs.fields(kind) if field.name == "protocol")
    assert field.default == 0 != PROTOCOL


def test_a_changed_message_raises_the_number() -> None:
    assert FIELDS[PROTOCOL] == digest_of_messages(), (
        "a message between trainer and engine has changed: raise PROTOCOL in sglang_reshard/version.py and add its "
        "digest here, unless no release has the number yet"
    )


def digest_of_messages() -> str:
    fields: list[Any] = []
    for module in (messages, weights_info):
        for name, kind in sorted(vars(module).items()):
            if inspect.isclass(kind) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__:
                hints = get_type_hints(kind)
                fields.append((name, [(f.encode_name, str(hints[f.name])) for f in msgspec.structs.fields(kind)]))
    return hashlib.sha256(repr(fields).encode()).hexdigest()[:16]

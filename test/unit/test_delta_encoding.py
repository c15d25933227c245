"""Deltas of one message: lossless, in the fewest bytes, and named by a checksum that both sides compute apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_reshard.routes.delta import encoding
from sglang_reshard.routes.delta.base_checksum import ROW_WORDS, message_checksum
from sglang_reshard.routes.delta.checks import is_sound, unfit_reason, verdicts
from sglang_reshard.routes.delta.encoding import BLOCK, UNITS, Kind, apply, encode, index_room
from sglang_reshard.routes.delta.messages import cut_between

SIZES = [1, 2, 3, 7, 8, 9, 64, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]


def messages(units: int, unit_bytes: int, changed: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two messages of so many units, in bytes, that differ in `changed` of them."""
    generator = np.random.default_rng(seed)
    base = generator.integers(0, 256, units * unit_bytes, np.uint8)
    new = base.copy()
    where = generator.choice(units, changed, replace=False)
    new.reshape(units, unit_bytes)[where, generator.integers(0, unit_bytes)] ^= generator.integers(1, 256, 1, np.uint8)
    return torch.from_numpy(new), torch.from_numpy(base)


@given(
    units=st.sampled_from(SIZES),
    unit_bytes=st.sampled_from(list(UNITS)),
    part=st.floats(0, 1) | st.floats(0, 0.05),
    seed=st.integers(0, 1 << 32),
    offset=st.sampled_from([0, 4]),
    numpy=st.booleans(),
)
def test_a_delta_is_lossless_and_takes_the_fewest_bytes(
    units: int, unit_bytes: int, part: float, seed: int, offset: int, numpy: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not numpy:  # as on a GPU
            patch.setattr(encoding, "_NUMPY", "nowhere")
        lossless(units, unit_bytes, part, seed, offset)


def lossless(units: int, unit_bytes: int, part: float, seed: int, offset: int) -> None:
    changed = min(units, round(part * units))
    new, base = messages(units, unit_bytes, changed, seed)
    base = torch.cat([torch.zeros(offset, dtype=torch.uint8), base])[offset:]  # at another address
    index = torch.full((index_room(units) + 64,), 0xAB, dtype=torch.uint8)
    values = torch.full((units * unit_bytes + 64,), 0xAB, dtype=torch.uint8)
    found = encode(new, base, unit_bytes, index, values)
    assert found is not None
    encoded = found
    ends = encoded.index_bytes(units), encoded.value_bytes(units, unit_bytes)
    assert encoded.changed == changed
    assert ends[0] <= index_room(units)
    assert encoded.payload_bytes(units, unit_bytes) == sum(ends) <= units * unit_bytes + 7
    assert (index[ends[0] :] == 0xAB).all(), "nothing is written beyond the index"
    assert (values[ends[1] :] == 0xAB).all(), "nothing is written beyond the values"
    assert unfit_reason(encoded, units) == ""
    if changed:
        kinds = [encoded._replace(kind=kind).payload_bytes(units, unit_bytes) for kind in Kind if kind is not Kind.SAME]
        assert sum(ends) == min(kinds)
    there = base.clone()
    index, values = index[: ends[0]].clone(), values[: ends[1]].clone()
    assert verdicts([is_sound(encoded, units, index)]) == [True]
    apply(encoded, index, values, unit_bytes, there)
    assert torch.equal(there, new)
    for part, other in ((0, values), (1, index)):
        if ends[part]:
            room = torch.empty(ends[part] - 8, dtype=torch.uint8)
            assert encode(new, base, unit_bytes, *((room, other) if part == 0 else (other, room))) is None


@given(
    units=st.sampled_from([*SIZES, ROW_WORDS * 4 + 3]),
    unit_bytes=st.sampled_from(list(UNITS)),
    seed=st.integers(0, 1 << 32),
    row=st.integers(0, 1000),
)
def test_a_checksum_is_of_values_wherever_they_are(units: int, unit_bytes: int, seed: int, row: int) -> None:
    new, base = messages(units, unit_bytes, 1, seed)
    assert message_checksum(base, row) != message_checksum(new, row)
    moved = torch.cat([torch.zeros(1, dtype=torch.uint8), new])[1:]
    assert message_checksum(moved, row) == message_checksum(new, row)


def test_a_checksum_depends_on_where_a_value_is() -> None:
    message = torch.arange(ROW_WORDS * 4 * 2, dtype=torch.int64).to(torch.uint8)
    swapped = message.clone()
    swapped[:4], swapped[4:8] = message[4:8], message[:4]
    found = {message_checksum(m, row) for m in (message, swapped) for row in (0, 1)}
    assert len(found) == 4


@given(st.lists(st.integers(0, 50)), st.integers(1, 100))
def test_pieces_are_all_messages_in_order(sizes: list[int], most: int) -> None:
    pieces = cut_between(sizes, 24, most)
    covered = [number for piece in pieces for number in piece.messages]
    assert covered == list(range(covered[0], covered[-1] + 1)) if covered else not any(sizes)
    end = 24
    for piece in pieces:
        of_piece = [sizes[number] for number in piece.messages]
        assert (piece.offset, piece.nbytes) == (end, sum(of_piece))
        assert piece.nbytes > 0
        assert piece.nbytes <= most or sum(size > 0 for size in of_piece) == 1
        end += piece.nbytes
    assert end == 24 + sum(sizes)

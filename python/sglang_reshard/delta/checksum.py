"""Checksums of a stream of messages, by which a base is named: trainer rank and engine rank compute them apart.

A message is divided into rows of 65,536 words of 32 bits; a word counts times the coefficients of its row and of its
place in it, modulo 2^64, see `digest.coefficients`. So a change of few units changes the sum by few terms.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from sglang_reshard.digest.checksum import sum_words
from sglang_reshard.digest.coefficients import MODULUS, WORD_BYTES, column_coefficients, tensor_coefficients

ROW_WORDS = 1 << 16


def rows_of(nbytes: int) -> int:
    """Returns the number of rows of a message."""
    return -(-nbytes // (ROW_WORDS * WORD_BYTES))


def message_checksum(message: torch.Tensor, first_row: int) -> int:
    """Returns the sum over a message: bytes, 1-D, whose first row has the number `first_row`.

    What is missing to a whole word counts as zeros.
    """
    if len(message) % WORD_BYTES:
        padded = message.new_zeros(-(-len(message) // WORD_BYTES) * WORD_BYTES)
        padded[: len(message)] = message
        message = padded
    if message.data_ptr() % WORD_BYTES:
        message = message.clone()
    words = message.view(torch.int32)
    whole = len(words) // ROW_WORDS
    rows = tensor_coefficients(np.arange(first_row, first_row + whole + 1))
    found = 0
    for part, of_rows in ((words[: whole * ROW_WORDS], rows[:whole]), (words[whole * ROW_WORDS :], rows[whole:])):
        if len(part):
            columns = column_coefficients(0, min(len(part), ROW_WORDS), 1, WORD_BYTES).values
            found += int(sum_words(part.view(1, len(of_rows), -1), of_rows, columns))
    return found % MODULUS


def change_of_checksum(positions: torch.Tensor, old: torch.Tensor, new: torch.Tensor, first_row: int) -> int:
    """Returns what `message_checksum` changes by, if units at `positions` (int64) do, from `old` to `new`."""
    unit_bytes = new.element_size()
    per_word, mask = WORD_BYTES // unit_bytes, (1 << 8 * unit_bytes) - 1
    words = positions // per_word
    rows, columns = _coefficients(int(words[-1]) // ROW_WORDS + 1, first_row, positions.device)
    change = ((new.to(torch.int64) & mask) - (old.to(torch.int64) & mask)) << (positions % per_word * 8 * unit_bytes)
    return int((change * rows[words // ROW_WORDS] * columns[words % ROW_WORDS]).sum()) % MODULUS


def _coefficients(rows: int, first_row: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    own = tensor_coefficients(np.arange(first_row, first_row + rows))
    return torch.from_numpy(own.view(np.int64)).to(device), _columns(device)


@functools.cache
def _columns(device: torch.device) -> torch.Tensor:
    values = column_coefficients(0, ROW_WORDS, 1, WORD_BYTES).values
    return torch.from_numpy(values.view(np.int64).copy()).to(device)

"""Checksums of a stream of messages, which identify a base: trainer rank and engine rank compute them apart.

A message is divided into rows of 65,536 words of 32 bits; a word counts times the coefficients of its row and of its
place in it, modulo 2^64, see `landings.checked.coefficients`.
"""

from __future__ import annotations

import numpy as np
import torch

from sglang_reshard.landings.checked.checksum import sum_words
from sglang_reshard.landings.checked.coefficients import MODULUS, WORD_BYTES, column_coefficients, tensor_coefficients

ROW_WORDS = 1 << 16


def row_count(nbytes: int) -> int:
    """Returns the number of rows of a message."""
    return -(-nbytes // (ROW_WORDS * WORD_BYTES))


def message_checksum(message: torch.Tensor, first_row: int) -> int:
    """Returns the sum over a message: bytes, 1-D, whose first row has the number `first_row`.

    Bytes that are missing in the last word count as zeros.
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

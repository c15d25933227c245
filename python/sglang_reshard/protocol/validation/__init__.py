"""What one process tells another about tensors and memory, checked before it is used.

A process knows who wrote a manifest, not that what it says is so: a trainer that is broken, or of another
make, must not end the engine that reads its memory, nor the other way round. How they travel, bounded and
under a content hash, is in `blobs`. After these checks every index is in its table, every view inside its
memory, and every piece of work bounded:

    layouts   `check_layout`   engine ranks, before anything is made of a trainer's layout
    handles   `check_handles`  engine ranks, before a trainer rank's memory is mapped
    orders    `check_order`    trainer ranks, before views for an engine rank's order are made
    words     `check_request`, `check_connect`  the numbers in what is said itself

All raise Mismatch. They run where a manifest is new, not in every update.
"""

from sglang_reshard.protocol.validation.commands import check_connect, check_request
from sglang_reshard.protocol.validation.handles import check_handles
from sglang_reshard.protocol.validation.layouts import check_layout
from sglang_reshard.protocol.validation.send_requests import check_order

__all__ = [
    "check_connect",
    "check_handles",
    "check_layout",
    "check_order",
    "check_request",
]

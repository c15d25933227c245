"""Forwards frames between two network devices, late and not all: `python impaired_link.py A B DELAY_S LOSS`.

What tc's netem does, where the kernel has none. Frames travel with their offload headers, so that they may be larger
than the network's packets, and without checksums.
"""

from __future__ import annotations

import heapq
import random
import select
import socket
import sys
import time

_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_OUTGOING, _ETH_P_ALL = 263, 15, 4, 3
_MAX_FRAME_BYTES = 1 << 17


def opened(device: str) -> socket.socket:
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    found.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    found.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE
    found.setsockopt(socket.SOL_SOCKET, 32, 1 << 26)  # SO_SNDBUFFORCE
    found.bind((device, 0))
    return found


def forward(a: str, b: str, delay_s: float, loss: float) -> None:
    ends = opened(a), opened(b)
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    queue: list[tuple[float, int, socket.socket, bytes]] = []
    number, chance = 0, random.Random(1)
    while True:
        wait_s = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        for end in select.select(ends, [], [], wait_s)[0]:
            frame, (_, _, kind, *_) = end.recvfrom(_MAX_FRAME_BYTES)
            if kind == _PACKET_OUTGOING or chance.random() < loss:  # those that this process has sent
                continue
            number += 1
            heapq.heappush(queue, (time.monotonic() + delay_s, number, other[end], frame))
        while queue and queue[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(queue)
            end.send(frame)


if __name__ == "__main__":
    forward(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))

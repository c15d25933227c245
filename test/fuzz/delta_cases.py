"""Applies damaged deltas between guard pages: `python -m fuzz.delta_cases section 1 0 1000`, kind, seed, first, last.

section  what a trainer rank sends an engine rank, through `DeltaTarget`
file     what a follower of snapshots reads, through `apply_delta`

Every case is either refused with Mismatch, or does what the format says, element by element. A section that is refused
was not written at all, and a file only where its chunks were in order: a follower deletes that copy. A write outside of
a buffer ends the process. The number of the case under way is in the file `--progress`, so
that a process that ended tells which one it was.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from fuzz.delta_mutations import Described, Shape, damage, described, places
from fuzz.guard_pages import GuardingTorch
from sglang_reshard.errors import Mismatch
from sglang_reshard.extras.snapshots import delta_file
from sglang_reshard.landings.base import Landing
from sglang_reshard.layout.regions import Box, Region
from sglang_reshard.plan import RankLocation, TensorIndex, plan_reads
from sglang_reshard.routes.base import Reads
from sglang_reshard.routes.delta import encoding
from sglang_reshard.routes.delta import target as target_module
from sglang_reshard.routes.delta.encoding import UNITS, encode, index_room
from sglang_reshard.routes.delta.incoming import P2pReceives
from sglang_reshard.routes.delta.offer import DeltaOffer
from sglang_reshard.routes.delta.source import DeltaSource
from sglang_reshard.routes.delta.target import DeltaTarget
from sglang_reshard.routes.p2p.links import kept_dtypes, sent_link
from sglang_reshard.routes.p2p.messages import send_request
from sglang_reshard.trace.program import Copy, Program
from support.plans import tensor_parallel

CPU = torch.device("cpu")
_WEIGHTS = 3, 4, 2, 3  # of the kinds; large ones take longer
_SAME_DELTAS = 10_000  # cases that are made of the same deltas
SHARES = (0.0005, 0.02, 0.2, 0.9)  # of elements that change: as positions, as bits, whole


class Model(NamedTuple):
    """Tensors of one dtype, transposed by the engine if `transposed`, and the bytes of a message."""

    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    round_bytes: int
    transposed: bool = False


MODELS = (
    Model("uint8", ((2 * encoding.BLOCK + 777,),), 1 << 20),
    Model("bfloat16", ((3, 7), (64, 33), (1,), (129,)), 2048),
    Model("float32", ((20_000,),), 32 << 10),
    Model("bfloat16", ((300, 240),), 1 << 20, transposed=True),
)


class Kind(Protocol):
    """Runs cases of one kind. Raises AssertionError for one that goes wrong."""

    def run(self, random: Random) -> str: ...


class Sections:
    """One model on one engine rank: its live weights are between guard pages, and so is all memory that it takes."""

    def __init__(self, model: Model, seed: int) -> None:
        self._torch = GuardingTorch()
        target_module.torch = self._torch  # type: ignore[attr-defined]
        layout = tensor_parallel(1, list(model.shapes), [-1] * len(model.shapes), model.dtype)
        dtype = getattr(torch, model.dtype)
        copies, end = [], 0
        for number, shape in enumerate(model.shapes):
            whole = Box.whole(shape)
            strides = tuple(int(np.prod(shape[d + 1 :])) for d in range(len(shape)))
            if model.transposed:
                strides = tuple(int(np.prod(shape[:d])) for d in range(len(shape)))
            copies.append(Copy(layout.tensors[number].name, Region.of(whole), "live", end, strides))
            end += whole.numel
        self.live = self._torch.bytes(end * dtype.itemsize)
        program = Program(tuple(copies), {"live": self.live.view(dtype)})
        index = TensorIndex.of(layout)
        plan = plan_reads(index, copies, RankLocation(0, 1, "engine", ("trainer",)))
        reads = Reads(0, CPU, index, plan, Landing(program).converting(CPU, model.round_bytes), {})
        self.target = DeltaTarget(reads, program, {0: model.round_bytes}, P2pReceives(None, reads, {}))
        self.target._incoming = self  # type: ignore[assignment]
        self._kept = len(self._torch.used)
        self.messages = self.target._written[0]
        units = tuple(self.messages.units)
        self.shape = Shape(units, self.messages.unit_bytes, 8)
        request = send_request(plan, 0, kept_dtypes(layout, plan, program, 0))
        generator = np.random.default_rng(seed)
        shards = [_some(generator, int(np.prod(s)), dtype).view(s) for s in model.shapes]
        self._memory, self._announced = bytearray(), 0
        self._sent = []
        for share in SHARES:
            source = DeltaSource(sent_link(layout, shards, request, model.round_bytes), model.round_bytes, CPU, None)
            source.commit(1)
            self.base = self._engines(source)
            changed = [_changed(generator, shard, share) for shard in shards]
            for shard, new in zip(shards, changed, strict=True):
                before = shard.clone()
                shard.copy_(new)
                new.copy_(before)
            if source.encode(2):
                data = bytes(source.section.numpy().tobytes())
                self._sent.append((data, source.nbytes))
            for shard, before in zip(shards, changed, strict=True):
                shard.copy_(before)
        assert len(self._sent) >= 2, "deltas of this model are not sent"
        self._begin = self.messages.table_bytes, self.messages.values_begin
        self._gaps = self._find_gaps()
        self._kept_base = self.live.clone()

    def run(self, random: Random) -> str:
        self._torch.at_end = random.random() < 0.7
        data, nbytes = random.choice(self._sent)
        memory = bytearray(data)
        table, begin = self._begin[0], self._begin[1]
        rows = described(self.shape, data[:table])
        assert rows is not None
        damage(memory, self.shape, 0, list(_spans(rows, table, with_values=False)), random)
        found = described(self.shape, bytes(memory[:table]))
        if found is not None and random.random() < 0.9:  # so that what follows the table is looked at
            nbytes = table + sum(one.index + one.values for one in found)
        if random.random() < 0.03:
            nbytes += random.choice((-8, -1, 1, 8, 1 << 31, -(1 << 31)))
        self._announced = begin + sum(one.values for one in found or ())
        self._memory = memory
        expected = self._expected(found, nbytes)
        section = {0: DeltaOffer(0, nbytes)}
        refusal = None
        try:
            self.target.receive_indexes(section)
        except Mismatch as error:
            refusal = str(error)
        assert torch.equal(self.live, self._kept_base), "something was written before all was checked"
        if refusal is not None:
            assert expected is None, f"a delta that can be applied was refused: {refusal}"
            assert "trainer rank 0 sent engine rank 0 a damaged delta of t" in refusal
        else:
            assert expected is not None, "a delta was accepted that no trainer rank sends"
            self.target.move(section)
            for number, message in enumerate(expected):
                now = self.messages.read(number).numpy()
                message[self._gaps[number]] = now[self._gaps[number]]
                assert np.array_equal(now, message), "other values were written"
            self.live.copy_(self._kept_base)
        self._torch.end(self._kept)
        return "applied" if refusal is None else "refused"

    # As `_Incoming`: what is asked for is there, and nothing else is asked for.

    extra_bytes = 0

    def receive_whole(self, trainer_ranks: Sequence[int]) -> None:
        assert not trainer_ranks

    def begin(self, sections: Any) -> None:
        pass

    def start(self, parts: Sequence[Any]) -> Any:
        for part in parts:
            end = part.offset + len(part.buffer)
            assert 0 <= part.offset <= end <= max(self._begin[0], self._announced), "bytes of nobody are read"
            own = np.frombuffer(self._memory, np.uint8)[part.offset : end]
            part.buffer.zero_()  # what the table announces, and nobody has sent
            part.buffer.numpy()[: len(own)] = own
        return lambda: None

    def _expected(self, rows: list[Described] | None, nbytes: int) -> list[np.ndarray] | None:
        """The messages once a delta is applied; None if it is refused."""
        table, begin = self._begin
        if rows is None or nbytes != table + sum(one.index + one.values for one in rows):
            return None
        found, memory = [], bytes(self._memory)
        for one, units, base in zip(rows, self.shape.units, self.base, strict=True):
            at = places(one, units, memory[table : table + one.index])
            if at is None:
                return None
            values = memory[begin : begin + len(at) * self.shape.unit_bytes].ljust(
                len(at) * self.shape.unit_bytes, b"\0"
            )
            message = base.copy().view(f"u{self.shape.unit_bytes}")
            message[at] = np.frombuffer(values, message.dtype)
            found.append(message.view(np.uint8))
            table, begin = table + one.index, begin + one.values
        return found

    def _engines(self, source: DeltaSource) -> list[np.ndarray]:
        """The engine's live weights become the source's; returns its messages."""
        found = []
        for number in range(len(self.messages)):
            message = self.messages.read(number)
            message.copy_(source._messages.read(number))
            self.messages.write(number)
            found.append(self.messages.read(number).numpy().copy())
        return found

    def _find_gaps(self) -> list[np.ndarray]:
        """Which bytes of each message are of no tensor, but between two: they are not looked at."""
        kept = self.live.clone()
        self.live.fill_(0xFF)
        found = [np.flatnonzero(self.messages.read(n).numpy() != 0xFF) for n in range(len(self.messages))]
        self.live.copy_(kept)
        return found


class Files:
    """Delta files of small chunks."""

    def __init__(self, folder: Path, unit_bytes: int, nbytes: int, chunk_bytes: int, seed: int) -> None:
        self._path, self._torch = folder / f"base-{unit_bytes}-{nbytes}", GuardingTorch()
        delta_file.torch = self._torch  # type: ignore[attr-defined]
        generator = np.random.default_rng(seed)
        self.base = generator.integers(0, 256, nbytes, np.uint8)
        self._path.write_bytes(self.base.tobytes())
        sizes = [min(chunk_bytes, nbytes - begin) for begin in range(0, nbytes, chunk_bytes)]
        self.shape = Shape(tuple(size // unit_bytes for size in sizes), unit_bytes, 4)
        header = json.dumps({"unit_bytes": unit_bytes, "nbytes": nbytes, "chunk_bytes": chunk_bytes}).encode()
        header += b" " * (-len(header) % 8)
        self._header = len(header).to_bytes(8, "little") + header
        self._sent = []
        for share in SHARES:
            new = _changed(generator, torch.from_numpy(self.base), share)
            table, body = [], b""
            index, values = (torch.empty(index_room(chunk_bytes) + nbytes + 8, dtype=torch.uint8) for _ in range(2))
            for number, (size, units) in enumerate(zip(sizes, self.shape.units, strict=True)):
                part = slice(number * chunk_bytes, number * chunk_bytes + size)
                one = encode(new[part], torch.from_numpy(self.base)[part], unit_bytes, index, values)
                assert one is not None
                table += [int(one.kind), one.changed]
                body += index[: one.index_bytes(units)].numpy().tobytes()
                body += values[: one.value_bytes(units, unit_bytes)].numpy().tobytes()
            self._sent.append(np.array(table, "<i4").tobytes() + body)

    def run(self, random: Random) -> str:
        self._torch.at_end = random.random() < 0.7
        data = bytearray(self._header + random.choice(self._sent))
        begin = len(self._header)
        table = 8 * len(self.shape.units)
        rows = described(self.shape, bytes(data[begin : begin + table]))
        assert rows is not None
        damage(data, self.shape, begin, list(_spans(rows, begin + table, with_values=True)), random)
        kind = random.random()
        if kind < 0.05:
            del data[random.randrange(len(data)) :]
        elif kind < 0.08:
            data += random.randbytes(random.choice((1, 8)))
        elif kind < 0.15:
            at = random.randrange(begin)
            data[at : at + 1] = random.choice((bytes([random.randrange(256)]), b"", b"9", b"0", b"-"))
        elif kind < 0.5:  # long enough for what the table says, so that what follows it is looked at
            found = described(self.shape, bytes(data[begin : begin + table]))
            if found is not None:
                wanted = begin + table + sum(one.index + one.values for one in found)
                data = data[:wanted].ljust(wanted, b"\0")
        expected = self._expected(bytes(data))
        refusal = None
        self._path.write_bytes(self.base.tobytes())
        try:
            delta_file.apply_delta(io.BytesIO(bytes(data)), self._path)
        except Mismatch as error:
            refusal = str(error)
        now = np.frombuffer(self._path.read_bytes(), np.uint8)
        if refusal is not None:
            assert expected is None, f"a delta that can be applied was refused: {refusal}"
            assert f"the delta of {self._path.name} is damaged, or belongs to another file" in refusal
            assert len(now) == len(self.base), "a delta was written outside of its file"
        else:
            assert expected is not None, f"a delta was accepted that no writer makes: {bytes(data[:120])!r}"
            assert np.array_equal(now, expected), "other values were written"
        self._torch.end(0)
        return "applied" if refusal is None else "refused"

    def _expected(self, data: bytes) -> np.ndarray | None:
        length = int.from_bytes(data[:8], "little")
        try:
            header = json.loads(data[8 : 8 + length]) if length <= 4096 else {}
            sizes = header["unit_bytes"], header["nbytes"], header.get("chunk_bytes", delta_file.CHUNK_BYTES)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        if any(type(size) is not int for size in sizes) or not set(header) <= {"unit_bytes", "nbytes", "chunk_bytes"}:
            return None
        unit_bytes, nbytes, chunk_bytes = sizes
        if nbytes != len(self.base) or unit_bytes not in UNITS or nbytes % unit_bytes or chunk_bytes % 8:
            return None
        if not delta_file._CHUNKS[0] <= chunk_bytes <= delta_file._CHUNKS[1]:
            return None
        units = tuple(min(chunk_bytes, nbytes - begin) // unit_bytes for begin in range(0, nbytes, chunk_bytes))
        at = 8 + length
        if len(data) < at:
            return None
        table = data[at : at + 8 * len(units)]
        rows = described(Shape(units, unit_bytes, 4), table) if len(table) == 8 * len(units) else None
        at += 8 * len(units)
        if rows is None or len(data) != at + sum(one.index + one.values for one in rows):
            return None
        found, begin = self.base.copy(), 0
        for one, count in zip(rows, units, strict=True):
            where = places(one, count, data[at : at + one.index])
            if where is None:
                return None
            at += one.index
            chunk = found[begin : begin + count * unit_bytes].view(f"u{unit_bytes}")
            chunk[where] = np.frombuffer(data, chunk.dtype, len(where), at)
            at += one.values
            begin += min(chunk_bytes, nbytes - begin)
        return found


def _some(generator: np.random.Generator, count: int, dtype: torch.dtype) -> torch.Tensor:
    data = generator.integers(0, 256, count * dtype.itemsize, np.uint8)
    return torch.from_numpy(data).view(dtype)


def _changed(generator: np.random.Generator, tensor: torch.Tensor, share: float) -> torch.Tensor:
    """A copy of which so many elements have another bit pattern."""
    found = tensor.clone().contiguous()
    data = found.view(-1).view(torch.uint8).numpy().reshape(found.numel(), -1)
    where = generator.choice(len(data), max(1, int(len(data) * share)), replace=False)
    data[where, 0] ^= generator.integers(1, 256, len(where), np.uint8)
    return found


def _spans(rows: Sequence[Described], begin: int, *, with_values: bool) -> Iterator[tuple[int, int, int]]:
    for number, one in enumerate(rows):
        yield number, begin, begin + one.index
        begin += one.index + (one.values if with_values else 0)


def kinds(kind: str, folder: Path, seed: int) -> list[Kind]:
    if kind == "section":
        return [Sections(model, seed) for model in MODELS]
    chunk = delta_file._CHUNKS[0]
    return [
        Files(folder, unit_bytes, nbytes, size, seed + number)
        for number, (unit_bytes, nbytes, size) in enumerate(
            ((1, 2 * chunk + 5, chunk), (2, 4_000, chunk), (4, 30_404, chunk), (1, 150_001, 1 << 20))
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fuzz.delta_cases", description=__doc__)
    parser.add_argument("kind", choices=("section", "file"))
    parser.add_argument("seed", type=int)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--progress", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counted = {"refused": 0, "applied": 0}
    with tempfile.TemporaryDirectory() as name:
        progress = open(arguments.progress, "wb", buffering=0) if arguments.progress else None  # noqa: SIM115
        started, runners = time.monotonic(), list[Kind]()
        for number in range(arguments.first, arguments.last):
            if number % _SAME_DELTAS == 0 or not runners:  # other deltas, by the case's own number
                runners = kinds(arguments.kind, Path(name), arguments.seed + number // _SAME_DELTAS)
            if progress is not None:
                progress.seek(0)
                progress.write(b"%d" % number)
            random = Random((arguments.seed << 40) + number)
            encoding._NUMPY = "cpu" if random.random() < 0.5 else "nowhere"  # as on a GPU
            runner = random.choices(runners, _WEIGHTS)[0]
            _use(runner)
            counted[runner.run(random)] += 1
        print(json.dumps(counted | {"seconds": time.monotonic() - started}))


def _use(runner: Kind) -> None:
    """Memory that is taken from now on is of this runner."""
    module = target_module if isinstance(runner, Sections) else delta_file
    module.torch = runner._torch  # type: ignore[attr-defined,union-attr]


if __name__ == "__main__":
    main()

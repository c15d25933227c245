"""The steps of SGLang's own tests of weight updates, taken one after the other by an engine of any SGLang.

    steps = Steps(engine, folder, "with")
    weights(steps, checkpoints)
    steps.outcomes    # {step: what the engine answered, and what it is then}

Two engines are alike where all outcomes are equal, whatever each of them is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from flights import Flight
from sglang_reshard.selftest.digests import read_live_digests
from update_groups import UpdateGroup

PROMPT = [5, 6, 7, 8]
NEW_TOKENS = 4
LONG = 150  # new tokens of requests that are in flight while weights change
# Names in the checkpoint of a parameter that SGLang fuses with others, of ones that it shards, and one of no model.
NAMES = [
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
    "model.no_such.weight",
]
_PLACE = re.compile(r"0x[0-9a-f]+")


class Steps:
    """Takes steps with one engine and keeps their outcomes, by name and in order."""

    def __init__(self, engine: Any, folder: Path, name: str) -> None:
        self.engine, self.manager = engine, engine.tokenizer_manager
        self._folder, self._name = folder, name
        self.outcomes: dict[str, Any] = {}
        self.has_sessions = hasattr(engine, "begin_weight_update")  # from 0.5.21

    def take(self, name: str, act: Callable[[], Any], *, look: bool = True) -> Any:
        """Acts, and keeps the answer, or the error, and what the engine is then.

        look  False where the engine is paused or in a session: it would not answer
        """
        assert name not in self.outcomes, name
        try:
            answer = act()
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        self.outcomes[name] = {"answer": self._plain(answer)}
        if look:
            self.outcomes[name] |= self.look()
        return answer

    def look(self) -> dict[str, Any]:
        """The live weights of all ranks, the tokens, and what the engine says of itself."""
        arguments = self.manager.server_args
        live = read_live_digests(self.engine, self._folder / f"steps-{self._name}")
        return {
            "weights": digest_of(live),
            "tokens": self.tokens(),
            "says": self._plain([arguments.model_path, arguments.load_format, arguments.weight_version]),
        }

    def tokens(self) -> list[Any]:
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        output = self.engine.generate(input_ids=PROMPT, sampling_params=sampling)
        self.go_around()
        return [output["output_ids"], output["meta_info"].get("weight_version")]

    def go_around(self) -> None:
        """Lets the scheduler's loop take a finished request off. If it is to flush the cache before, 0.5.12 ends, and
        0.5.23 refuses."""
        self.engine.loop.run_until_complete(self.manager.get_internal_state())

    def ask(self, method: str, request: Any) -> Any:
        """What a method of the tokenizer manager answers, which the HTTP endpoints call."""
        return self.engine.loop.run_until_complete(getattr(self.manager, method)(request))

    @contextmanager
    def session(self, name: str) -> Iterator[None]:
        """SGLang's weight-update session, where there are any."""
        if self.has_sessions:
            self.take(f"{name}: a session begins", self.engine.begin_weight_update, look=False)
        yield
        if self.has_sessions:
            self.take(f"{name}: the session ends", self.engine.end_weight_update)

    def update(self, name: str, act: Callable[[], Any]) -> None:
        """A step that SGLang takes in a session, where there are any."""
        with self.session(name):
            self.take(name, act, look=not self.has_sessions)

    def _plain(self, answer: Any) -> Any:
        """The answer without what differs between two engines: folders and addresses."""
        text = json.dumps(answer, default=_fields)
        return json.loads(_PLACE.sub("0x", text.replace(str(self._folder), "FOLDER")))


def digest_of(live: list[dict[str, str]]) -> str:
    return hashlib.sha256(json.dumps(live, sort_keys=True).encode()).hexdigest()


def _fields(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    named = getattr(value, "__dict__", None) or {k: getattr(value, k) for k in getattr(value, "__struct_fields__", ())}
    # Requests and answers have numbers of their own.
    return {k: v for k, v in named.items() if k in ("success", "message", "payload")} or type(value).__name__


def all_steps(engine: Any, folder: Path, name: str) -> dict[str, Any]:
    """From disk, by tensors, by a process group, in pauses, and around released memory: to `checkpoint-1` or -2."""
    steps = Steps(engine, folder, name)
    one, two = folder / "checkpoint-1", folder / "checkpoint-2"
    _from_disk(steps, one, two)
    first, second = (load_file(path / "model.safetensors") for path in (one, two))
    _read(steps, "weights 1")
    _from_tensors(steps, first, second)
    _read(steps, "weights 2")
    if steps.has_sessions:
        _sessions(steps, first)
    _from_distributed(steps, first, second)
    _in_pauses(steps, one, first, second)
    _released(steps, two)
    return steps.outcomes


def _from_disk(steps: Steps, one: Path, two: Path) -> None:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput as Request

    def load(path: Path, **options: Any) -> Callable[[], Any]:
        return lambda: steps.ask("update_weights_from_disk", Request(model_path=str(path), **options))

    missing = one.parent / "no checkpoint"
    steps.take("disk: weights 1", lambda: steps.engine.update_weights_from_disk(str(one), load_format="auto"))
    steps.take("disk: weights 2", lambda: steps.engine.update_weights_from_disk(str(two)))
    steps.take("disk: back", lambda: steps.engine.update_weights_from_disk(str(one)))
    steps.take("disk: no checkpoint", lambda: steps.engine.update_weights_from_disk(str(missing)))
    steps.take("disk: after the refusal", load(two))
    steps.take("disk: dummy weights", load(one, load_format="dummy"))
    steps.take("disk: a version", load(one, weight_version="first"))
    steps.take("disk: a version of no checkpoint", load(missing, weight_version="second"))
    steps.take("disk: the version before", load(two, weight_version="default"))
    steps.take("disk: cache kept", load(one, flush_cache=False))
    steps.take("disk: cache flushed", steps.engine.flush_cache)
    flight = Flight(steps.engine, PROMPT, LONG)
    flight.wait()
    # 0.5.12 ends if it is to flush the cache before its loop has seen that the requests are aborted.
    steps.take("disk: requests aborted", load(two, abort_all_requests=True, flush_cache=False), look=False)
    steps.take("disk: how the request ended", lambda: flight.end()["reason"])
    steps.take("disk: at the end", load(one))


def _read(steps: Steps, when: str) -> None:
    for name in NAMES:
        for size in (2, 100):
            read = lambda name=name, size=size: steps.engine.get_weights_by_name(name, size)  # noqa: E731
            steps.take(f"get {size} of {name}, {when}", read, look=False)


def _from_tensors(steps: Steps, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput as Request
    from sglang.srt.utils import MultiprocessingSerializer

    ranks = steps.engine.server_args.tp_size
    send = steps.engine.update_weights_from_tensor
    steps.update("tensors: weights 2", lambda: send(list(second.items())))
    steps.update("tensors: one layer of weights 1", lambda: send(_of(first, "layers.0.")))
    steps.update("tensors: nothing", lambda: send([]))
    buckets = _buckets(first)
    for number, bucket in enumerate(buckets):
        last = number + 1 == len(buckets)
        steps.update(f"tensors: bucket {number}", lambda bucket=bucket, last=last: send(bucket, flush_cache=last))
    halves = [(name, tensor.bfloat16()) for name, tensor in second.items()]
    steps.update("tensors: in bfloat16", lambda: send(halves))
    steps.update("tensors: direct", lambda: send([("model.norm.weight", first["model.norm.weight"])], "direct"))
    packed = [MultiprocessingSerializer.serialize(_flattened(second)) for _ in range(ranks)]
    steps.update("tensors: a flattened bucket", lambda: send(packed, load_format="flattened_bucket"))

    def versioned(version: str) -> Any:
        serialized = [MultiprocessingSerializer.serialize(_of(first, "layers.1.")) for _ in range(ranks)]
        request = Request(serialized_named_tensors=serialized, weight_version=version)
        return steps.ask("update_weights_from_tensor", request)

    steps.update("tensors: a version", lambda: versioned("third"))
    steps.update("tensors: the version before", lambda: versioned("default"))
    steps.update("tensors: weights 2 again", lambda: send(list(second.items())))


def _sessions(steps: Steps, first: dict[str, torch.Tensor]) -> None:
    engine = steps.engine
    given = list(first.items())
    steps.take("session: none is open", lambda: engine.update_weights_from_tensor(given))
    steps.take("session: none to end", engine.end_weight_update)
    steps.take("session: begins", engine.begin_weight_update, look=False)
    steps.take("session: begins twice", engine.begin_weight_update, look=False)
    steps.take("session: half of weights 1", lambda: engine.update_weights_from_tensor(given[::2]), look=False)
    steps.take("session: the other half", lambda: engine.update_weights_from_tensor(given[1::2]), look=False)
    steps.take("session: ends", engine.end_weight_update)
    steps.take("session: empty, begins", engine.begin_weight_update, look=False)
    steps.take("session: empty, ends", engine.end_weight_update)


def _from_distributed(steps: Steps, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    group = UpdateGroup(steps.engine, "steps")
    steps.take("group: none to destroy", group.destroy)
    steps.take("group: made", group.make)
    steps.update("group: weights 1", lambda: group.send(first))
    steps.update("group: one layer of weights 2", lambda: group.send(dict(_of(second, "layers.0."))))
    steps.update("group: a flattened bucket", lambda: group.send(second, load_format="flattened_bucket"))
    steps.update("group: cache kept", lambda: group.send(first, flush_cache=False))
    steps.take("group: cache flushed", steps.engine.flush_cache)
    steps.take("group: destroyed", group.destroy)
    steps.take("group: destroyed twice", group.destroy)
    steps.take("group: made again", group.make)
    steps.update("group: weights 2", lambda: group.send(second))
    steps.take("group: destroyed again", group.destroy)


def _in_pauses(steps: Steps, one: Path, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput as Request

    def tensors(weights: dict[str, torch.Tensor], flush: bool) -> Callable[[], Any]:
        return lambda: steps.engine.update_weights_from_tensor(list(weights.items()), flush_cache=flush)

    def disk() -> Any:
        request = Request(model_path=str(one), weight_version="fourth", flush_cache=False)
        return steps.ask("update_weights_from_disk", request)

    # 0.5.12 ends if it is to flush the cache while requests wait, as they do after a retracting pause.

    for mode, updates in {
        "abort": [("tensors", tensors(first, True))],
        "retract": [("disk", disk), ("tensors", tensors(second, False))],
        "in_place": [("tensors", tensors(first, False))],
    }.items():
        flight = Flight(steps.engine, PROMPT, LONG)
        steps.take(f"{mode}: paused", lambda flight=flight, mode=mode: 0 < flight.pause(mode) < LONG, look=False)
        for name, update in updates:
            sessions = steps.has_sessions and name == "tensors"
            if sessions:
                steps.take(f"{mode}: {name}, begins", steps.engine.begin_weight_update, look=False)
            steps.take(f"{mode}: {name}", update, look=False)
            if sessions:
                steps.take(f"{mode}: {name}, ends", steps.engine.end_weight_update, look=False)
        ended = lambda flight=flight, mode=mode: _ended(flight.go_on(), mode)  # noqa: E731
        steps.take(f"{mode}: continued", ended, look=False)
        steps.go_around()
        steps.take(f"{mode}: cache flushed", steps.engine.flush_cache)


def _ended(outcome: dict[str, Any], mode: str) -> list[Any]:
    """How a request ended that was paused somewhere: which tokens come of which weights is left to chance."""
    return [outcome["reason"], None if mode == "abort" else len(outcome["tokens"])]


def _released(steps: Steps, two: Path) -> None:
    engine = steps.engine
    for tags in (["weights"], ["kv_cache"], None):
        steps.take(f"released: {tags}", lambda tags=tags: engine.release_memory_occupation(tags), look=False)
        steps.take(f"resumed: {tags}", lambda tags=tags: engine.resume_memory_occupation(tags))
    steps.take("resumed: weights 2", lambda: engine.update_weights_from_disk(str(two)))


def _of(weights: dict[str, torch.Tensor], part: str) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in weights.items() if part in name]


def _buckets(weights: dict[str, torch.Tensor]) -> list[list[tuple[str, torch.Tensor]]]:
    """All of them in three calls. Layers are cut anywhere, as buckets of so many bytes cut them."""
    items = list(weights.items())
    third = -(-len(items) // 3)
    return [items[:third], items[third : 2 * third], items[2 * third :]]


def _flattened(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = FlattenedTensorBucket(named_tensors=list(weights.items()))
    return {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}


_REFUSED = [
    "disk: no checkpoint",
    "disk: dummy weights",
    "disk: a version of no checkpoint",
    "group: none to destroy",
    "group: destroyed twice",
]
_FIRST = ["disk: back", "disk: at the end", "disk: cache kept", "abort: cache flushed", "in_place: cache flushed"]
_SECOND = [
    "disk: after the refusal",
    "tensors: a flattened bucket",
    "tensors: weights 2 again",
    "group: a flattened bucket",
    "group: weights 2",
    "retract: cache flushed",
    "resumed: weights 2",
]


def did_what_they_say(outcomes: dict[str, Any]) -> dict[str, bool]:
    """Whether steps that bring weights 1 or 2 brought those, and whether what must be refused was."""

    def weights(name: str) -> str:
        found = outcomes.get(f"{name}: the session ends", outcomes[name])["weights"]
        assert isinstance(found, str)
        return found

    first, second = weights("disk: weights 1"), weights("disk: weights 2")
    return {
        "weights 1 and 2 differ": first != second,
        **{name: weights(name) == first for name in _FIRST},
        **{name: weights(name) == second for name in _SECOND},
        **{name: outcomes[name]["answer"][0] is False for name in _REFUSED},
        "some layers alone": weights("tensors: one layer of weights 1") not in (first, second),
        "a version": outcomes["disk: a version"]["tokens"][1] == "first",
        "no version": outcomes["disk: a version of no checkpoint"]["tokens"][1] == "first",
        "an aborted request": outcomes["disk: how the request ended"]["answer"] == "abort",
        "retracted": outcomes["retract: continued"]["answer"] == ["length", LONG],
        "in place": outcomes["in_place: continued"]["answer"] == ["length", LONG],
    }

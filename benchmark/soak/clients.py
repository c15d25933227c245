"""Who asks the server to generate, all the time: threads that send their next request when the last is answered."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmark.soak.standing import Standing

NEW_TOKENS = 8
_PROMPTS = [[11, 12, 13], [400, 401, 402, 403], [7], [1000, 2000, 3000, 4000, 5]]
_TIMEOUT_S = 120.0
_TOLD = 10  # of each kind of complaint, in words; all are counted
_BREATHER_S = 0.2  # after a failure, so that a dead server is not asked a thousand times


@dataclass(slots=True)
class Tally:
    """What one client saw.

    seconds       of each request that was answered in full
    failures      how many were not: another status than 200, an error, an abort, too few tokens, no answer
    wrong_version how many were answered with weights of a version that was not due then
    complaints    the first of both, in words
    """

    stream: bool
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    failures: int = 0
    wrong_version: int = 0
    complaints: list[str] = field(default_factory=list)

    def complain(self, what: str) -> None:
        if len(self.complaints) < _TOLD:
            self.complaints.append(what)


@contextmanager
def asking(url: str, standing: Standing, count: int) -> Iterator[list[Tally]]:
    """So many clients ask from the block's begin to its end, every second of them for a stream."""
    stop = threading.Event()
    tallies = [Tally(stream=bool(number % 2)) for number in range(count)]
    threads = [threading.Thread(target=_ask, args=(url, standing, tally, stop)) for tally in tallies]
    for thread in threads:
        thread.start()
    try:
        yield tallies
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _ask(url: str, standing: Standing, tally: Tally, stop: threading.Event) -> None:
    newest = 0
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S, trust_env=False) as client:
        for prompt in itertools.cycle(_PROMPTS):
            if stop.is_set():
                return
            newest = max(newest, standing.returned)
            begin = time.perf_counter()
            try:
                versions = _generate(client, prompt, tally.stream)
            except (httpx.HTTPError, _Failed, ValueError, KeyError) as error:
                tally.failures += 1
                tally.complain(f"due version {newest}: {type(error).__name__}: {error}")
                stop.wait(_BREATHER_S)
                continue
            tally.seconds.append(time.perf_counter() - begin)
            tally.tokens += NEW_TOKENS
            if len(versions) > 1 or not newest <= min(versions) <= max(versions) <= standing.begun:
                tally.wrong_version += 1
                tally.complain(
                    f"answered with version {sorted(versions)}: version {newest} was due, {standing.begun} begun"
                )
            newest = max(newest, *versions)


class _Failed(Exception):
    """The server answered, but not with what was asked for."""


def _generate(client: httpx.Client, prompt: list[int], stream: bool) -> set[int]:
    """The versions that the parts of the answer name."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": stream}
    answer: dict[str, Any] = {}
    versions = set()
    with client.stream("POST", "/generate", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise _Failed(f"status {response.status_code}: {response.read()[:200]!r}")
        for answer in _events(response) if stream else [json.loads(response.read())]:
            if "error" in answer:
                raise _Failed(f"error {answer['error']}")
            versions.add(_number(answer["meta_info"]["weight_version"]))
    if not answer:
        raise _Failed("a stream without an event")
    finish = answer["meta_info"]["finish_reason"]
    if finish is None or finish["type"] != "length" or answer["meta_info"]["completion_tokens"] != NEW_TOKENS:
        raise _Failed(f"ended after {answer['meta_info']['completion_tokens']} of {NEW_TOKENS} tokens by {finish}")
    return versions


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _number(version: str) -> int:
    """SGLang's name for the weights before the first update is "default"."""
    return 0 if version == "default" else int(version)

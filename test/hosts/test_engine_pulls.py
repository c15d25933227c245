"""A server takes the weights of one on other hosts: by messages and by NIXL, and when that one vanishes meanwhile."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.hosts import Host, laboratory, why_not
from support.nixl_env import needs_nixl
from support.places import Places, paths, servers_on, trainers_on, url_of
from support.tiny_qwen3 import tiny_qwen3

pytestmark = [
    pytest.mark.engine,
    pytest.mark.sweep,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
_DEADLINE_S = 400
_ASK = """
import json, sys
from sglang_reshard import RemoteEngine
engine = RemoteEngine(sys.argv[1], timeout_s=60)
sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
try:
    answer = engine.generate(input_ids=[[5, 6, 7, 8]], sampling_params=sampling)[0]["output_ids"]
except Exception as error:
    answer = type(error).__name__
info = engine.weights_info()
print(json.dumps([answer, info.version, info.digest, info.torn]))
"""


def ask(host: Host, url: str) -> list[Any]:
    """What a server says, its version and digest, and why it is torn, as asked from a host."""
    command = host.command([sys.executable, "-c", _ASK, url])
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=90)
    return list(httpx.Response(200, text=done.stdout.splitlines()[-1]).json())


def pull(host: Host, source: Host, target: Host, *options: str, **variables: Any) -> subprocess.Popen[str]:
    command = [Path(sys.executable).with_name("sglang-reshard"), "pull", "--timeout-s", "60"]
    command += ["--from", url_of(source), "--to", url_of(target), *options]
    return host.run(command, env=paths({}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **variables)


@pytest.mark.parametrize(
    ("asked", "transport"),
    [("auto", "p2p"), pytest.param("nixl", "nixl", marks=needs_nixl)],
)
def test_a_server_takes_the_weights_of_one_on_other_hosts(asked: str, transport: str, tmp_path: Path) -> None:
    tiny_qwen3().save_pretrained(tmp_path / "model")
    deadline = time.monotonic() + _DEADLINE_S
    places = Places(tmp_path)
    with laboratory(3, names_lead_to_loopback=False) as (a, b, c):
        servers = servers_on(places, [a, b], tmp_path, 4) + servers_on(places, [c], tmp_path, 2)
        for host in (a, c):
            places.await_health(c, url_of(host), servers, deadline)
        trainers = trainers_on(places, [b], 1, str(tmp_path), "4", url_of(a), "auto", "fsdp", "last update unread")
        places.await_end(trainers, deadline)
        has = ask(c, url_of(a))
        assert ask(c, url_of(c))[:2] != has[:2]
        pulling = pull(c, a, c, "--transport", asked)
        said, _ = pulling.communicate(timeout=120)
        assert pulling.returncode == 0, said
        assert transport in said
        assert ask(c, url_of(c)) == has
        assert has[1:] == ["2", has[2], ""]


def test_a_server_whose_source_vanishes_says_so_and_serves_nothing_mixed(tmp_path: Path) -> None:
    tiny_qwen3().save_pretrained(tmp_path / "model")
    deadline = time.monotonic() + _DEADLINE_S
    places = Places(tmp_path)
    with laboratory(2, names_lead_to_loopback=False) as (a, c):
        servers = servers_on(places, [a], tmp_path, 2) + servers_on(places, [c], tmp_path, 1)
        for host in (a, c):
            places.await_health(host, url_of(host), servers, deadline)
        trainers = trainers_on(places, [a], 1, str(tmp_path), "2", url_of(a), "auto", "fsdp", "last update unread")
        places.await_end(trainers, deadline)
        before = ask(c, url_of(c))
        a.shape("200kbit", burst="32kb")
        pulling = pull(c, a, c)
        time.sleep(15)
        assert pulling.poll() is None, pulling.communicate()[0]
        a.set_link(up=False)
        vanished = time.monotonic()
        said, _ = pulling.communicate(timeout=120)
        assert time.monotonic() - vanished < 20
        assert pulling.returncode == 1
        assert "can no longer be reached" in said
        answer, version, _, torn = ask(c, url_of(c))
        assert (answer == "TornWeights" and torn) or (answer, version) == tuple(before[:2])

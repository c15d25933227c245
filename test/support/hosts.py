"""Several hosts on this one: network, UTS, PID, IPC and mount namespaces, joined by a switch with shaped links.

    with laboratory(2, rate="1gbit") as (a, b):
        a.run([sys.executable, "serve.py", a.address])     # a Popen; it ends with its host at the latest

A host has an address, a host name that the others resolve to it (and itself to loopback, as Debian does), processes
that see no others, and a /dev/shm of its own. The file system is this host's. Nothing reaches the network outside.
Needs root: `why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
_START_S = 60.0
_NOBODY = "02:00:00:00:00:01"  # no host has it


@functools.cache
def why_not() -> str:
    """Why this machine cannot be several hosts; empty if it can."""
    if os.geteuid() != 0:
        return "namespaces for hosts need root"
    if missing := [name for name in ("ip", "tc", "nsenter", "unshare") if shutil.which(name) is None]:
        return f"hosts need the programs {', '.join(missing)}"
    try:
        with laboratory(1):
            return ""
    except (subprocess.CalledProcessError, RuntimeError) as error:
        return f"hosts cannot be made here: {error}"


@dataclass(frozen=True, slots=True)
class Host:
    """One host: its name and address, and the first process in its namespaces, which holds them."""

    name: str
    address: str
    holder: int
    _link: tuple[str, str]  # the switch's namespace, and the port there

    def command(self, command: Sequence[str | Path]) -> list[str]:
        """The command that runs another one on this host."""
        return ["nsenter", f"--target={self.holder}", *_NAMESPACES, "--", *map(str, command)]

    def run(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(self.command(command), **options)

    def shape(self, rate: str, burst: str = "1mb") -> None:
        """Limits what this host sends: as tc has it, "800mbit"; empty for no limit. `burst` is free after a pause."""
        self._tc("del", check=False)
        if rate:
            self._tc("add", "tbf", "rate", rate, "burst", burst, "latency", "50ms")

    def set_link(self, up: bool) -> None:
        """Plugs or unplugs the host's cable."""
        switch, port = self._link
        _run("ip", "-n", switch, "link", "set", port, "up" if up else "down")

    def cut_off(self, other: Host) -> None:
        """Parts two hosts of one switch: what either sends to the other gets lost."""
        for here, there in ((self, other), (other, self)):
            here._neighbour("replace", there.address, "lladdr", _NOBODY, "nud", "permanent")

    def take_address(self, other: Host, known_to: Sequence[Host]) -> None:
        """Takes the address of a host that is gone, as those learn that it is known to."""
        _run(*self.command(["ip", "address", "add", f"{other.address}/24", "dev", "eth0"]))
        for host in known_to:
            host._neighbour("delete", other.address)

    def _neighbour(self, verb: str, address: str, *arguments: str) -> None:
        _run(*self.command(["ip", "neighbour", verb, address, "dev", "eth0", *arguments]))

    def _tc(self, verb: str, *arguments: str, check: bool = True) -> None:
        command = self.command(["tc", "qdisc", verb, "dev", "eth0", "root", *arguments])
        subprocess.run(command, check=check, capture_output=True, text=True)


@contextlib.contextmanager
def laboratory(
    count: int, rate: str = "", *, delay_s: float = 0.0, loss: float = 0.0, names_lead_to_loopback: bool = True
) -> Iterator[list[Host]]:
    """`count` hosts on one switch, gone afterwards with all their processes.

    rate                    what each host sends at most, see `Host.shape`
    delay_s, loss           seconds that a packet takes to and from the first host, and the share of those that are lost
    names_lead_to_loopback  whether a host resolves its own name so
    """
    lab = secrets.token_hex(3)
    switch, subnet = f"lab-{lab}", f"10.{secrets.randbelow(200) + 20}.{secrets.randbelow(250)}"
    names = [f"host-{chr(ord('a') + i)}" for i in range(count)]
    hosts: list[Host] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lab-")))
        for own in names:
            addresses = [f"{subnet}.{i + 1}" for i in range(count)]
            if names_lead_to_loopback:
                addresses[names.index(own)] = "127.0.1.1"
            lines = [" ".join(pair) for pair in zip(addresses, names, strict=True)]
            (folder / f"{own}.hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        _run("ip", "netns", "add", switch)
        stack.callback(_run, "ip", "netns", "delete", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            hosts.append(stack.enter_context(_host(switch, name, f"{subnet}.{number + 1}", number, folder)))
            hosts[-1].shape(rate)
        if delay_s or loss:
            stack.enter_context(_impaired(switch, "port0", delay_s, loss))
        yield hosts


@contextlib.contextmanager
def _impaired(switch: str, port: str, delay_s: float, loss: float) -> Iterator[None]:
    """Takes a port from the switch's bridge, and puts a process between them."""
    _run("ip", "-n", switch, "link", "add", "behind", "type", "veth", "peer", "name", "before")
    _run("ip", "-n", switch, "link", "set", port, "nomaster")
    _run("ip", "-n", switch, "link", "set", "behind", "master", "bridge", "up")
    _run("ip", "-n", switch, "link", "set", "before", "up")
    script = Path(__file__).with_name("impaired_link.py")
    command = ["ip", "netns", "exec", switch, sys.executable, script, port, "before", str(delay_s), str(loss)]
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _host(switch: str, name: str, address: str, number: int, folder: Path) -> Iterator[Host]:
    set_up = (
        "mount -t tmpfs -o size=8g shm /dev/shm && "
        f"mount --bind {folder}/{name}.hosts /etc/hosts && hostname {name} && "
        f"ip link set lo up && touch {folder}/{name} && exec sleep infinity"
    )
    unshare = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc", "sh", "-c", set_up]
    parent = subprocess.Popen(unshare, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        holder = _child_of(parent, folder / name)
        port = f"port{number}"
        _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(holder))
        _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
        host = Host(name, address, holder, (switch, port))
        for command in (f"ip address add {address}/24 dev eth0", "ip link set eth0 up"):
            _run(*host.command(command.split()))
        yield host
    finally:
        parent.send_signal(signal.SIGKILL)  # and so its child, the host's first process, and with it all of them
        parent.wait()
        if parent.stderr is not None:
            parent.stderr.close()


def _child_of(parent: subprocess.Popen[str], ready: Path) -> int:
    """The process that holds the namespaces, once it has set them up."""
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    end = time.monotonic() + _START_S
    while not ready.exists():
        if parent.poll() is not None or time.monotonic() > end:
            raise RuntimeError(parent.communicate()[1] if parent.poll() is not None else f"no {ready.name} was made")
        time.sleep(0.01)
    return int(children.read_text().split()[0])


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def environment(**variables: str) -> Mapping[str, str]:
    """This process's, without what names an interface, and with `variables`."""
    named = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    return {**{key: value for key, value in os.environ.items() if key not in named}, **variables}

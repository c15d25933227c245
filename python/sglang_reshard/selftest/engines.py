"""Starts real SGLang engines for a self-test: in a trainer rank's process, or as a server."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from sglang_reshard.errors import DeadlineExceeded, ReshardError
from sglang_reshard.selftest import children, tiny_model
from sglang_reshard.selftest.digests import LOADER
from sglang_reshard.selftest.job import Run
from sglang_reshard.testing import cpu_host

START_S = 300.0
ON_GPUS = {
    "enable_memory_saver": True,
    "max_total_tokens": 4096,
    "cuda_graph_max_bs": 4,
    "attention_backend": "triton",  # needs the fewest compiled kernels
    "sampling_backend": "pytorch",
}


def arguments(run: Run, model: Path) -> dict[str, Any]:
    """Returns the arguments of `sglang.Engine`: on GPUs with CUDA graphs and the memory saver."""
    given: dict[str, Any] = {
        "model_path": str(model),
        "load_format": "dummy",
        "dtype": run.dtype,
        "skip_tokenizer_init": True,
        "context_length": tiny_model.CONTEXT_LENGTH,
        "custom_weight_loader": [LOADER],
        "log_level": "error",
        **run.target.arguments,
    }
    if run.device == "cpu":
        return cpu_host.engine_arguments(**given)
    own = {"base_gpu_id": run.engine_gpus[0], "mem_fraction_static": 0.4 if run.colocated else 0.8}
    return given | ON_GPUS | own | run.engine


def start(run: Run, model: Path) -> Any:
    """Starts an engine in child processes."""
    from sglang.srt.entrypoints.engine import Engine

    from sglang_reshard.patches.launch import without_torchrun_variables

    with without_torchrun_variables():
        return Engine(**arguments(run, model))


@contextlib.contextmanager
def serving(
    run: Run, model: Path, environment: dict[str, str], log: Path, address: str = "127.0.0.1", key: str = ""
) -> Iterator[tuple[str, children.Family]]:
    """Yields the URL of a server, once it is up, and its processes. Raises ReshardError if it ends before that."""
    port = children.free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--port", str(port), "--skip-server-warmup"]
    command += ["--host", address, *(["--api-key", key, "--admin-api-key", key] if key else [])]
    for name, value in arguments(run, model).items():
        if value is not False:
            command += [f"--{name.replace('_', '-')}", *_words(value)]
    with children.started(command, environment, log) as server:
        url = f"http://{address}:{port}"
        await_health(url, server, log)
        yield url, server


def await_health(url: str, server: children.Family, log: Path) -> None:
    """Waits until a server is up. One that started on dummy weights is, and says that they are missing."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        check_alive(server, log)
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"{url}/health", timeout=5.0, trust_env=False)
            if answer.status_code == httpx.codes.OK or "WeightsMissing" in answer.text:
                return
        time.sleep(0.2)
    raise DeadlineExceeded(f"the server was not healthy after {START_S:.0f} s.\n{children.tail(log)}")


def check_alive(server: children.Family, log: Path) -> None:
    """Raises ReshardError when a server has ended although nobody told it to."""
    server.census()
    if server.processes[0].poll() is not None:
        raise ReshardError(f"the server ended by itself.\n{children.tail(log)}")


def _words(value: Any) -> list[str]:
    if value is True:
        return []
    return [str(word) for word in value] if isinstance(value, list) else [str(value)]

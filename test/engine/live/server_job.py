"""What the trainer ranks of test_server.py do: a server that somebody else started, reached by URL."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmark.reference import greedy_tokens
from sglang_reshard import SnapshotFollower, Snapshots, VerlEngine, WeightSender
from sglang_reshard.api.remote_engine import RemoteEngine
from sglang_reshard.cli.layouts import Source
from sglang_reshard.routes.p2p.trainer import P2pSender
from sglang_reshard.selftest import text, tiny_model
from sglang_reshard.selftest.trainer import Trainer
from support.live_engines import greedy, live_engine
from support.refusals import refusal_of

SLOW_S = 3.0
SPANNING = 150  # new tokens of requests that are being served while weights change
PROMPTS = [[5, 6, 7, 8], [100, 200]]


class Client(threading.Thread):
    """Generates all the time; `answers` has the time of each answer, its version and its tokens."""

    def __init__(self, url: str, key: str, new_tokens: int = 4) -> None:
        super().__init__(daemon=True)
        self._url, self._headers = url, {"Authorization": f"Bearer {key}"}
        self._sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        self._ended = threading.Event()
        self.answers: list[tuple[float, str, list[int]]] = []

    def run(self) -> None:
        body = {"input_ids": PROMPTS[0], "sampling_params": self._sampling}
        while not self._ended.is_set():
            answer = httpx.post(f"{self._url}/generate", json=body, headers=self._headers, timeout=60)
            answer.raise_for_status()
            said = answer.json()
            self.answers.append((time.monotonic(), said["meta_info"]["weight_version"], said["output_ids"]))

    def end(self) -> None:
        self._ended.set()
        self.join()


class Served:
    """A trainer of tensor parallel ranks, and the server that the job names."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.rank, ranks = dist.get_rank(), dist.get_world_size()
        self.mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        self.trainer = Trainer(tiny_model.config(ranks, job.get("target_tp", 1)), Source(tp=ranks))
        self.folder, self._job = Path(job["folder"]), job
        self.server = RemoteEngine(job["url"], admin_api_key=job["key"])

    def sender(self) -> WeightSender:
        return WeightSender(self._job["url"], self.mesh.get_group(), admin_api_key=self._job["key"], timeout_s=180)

    def scale(self, factor: float, part: str = "") -> None:
        """Multiplies the parameters with `part` in their names."""
        with torch.no_grad():
            for name, parameter in self.trainer.model.named_parameters():
                if part in name:
                    (parameter.to_local() if isinstance(parameter, DTensor) else parameter).mul_(factor)

    def named(self) -> Any:
        return self.trainer.model.named_parameters()

    def tokens(self) -> list[list[int]]:
        return greedy(self.server, PROMPTS, text.NEW_TOKENS)

    def expected(self) -> list[list[int]]:
        """What transformers says with the trainer's weights."""
        self.trainer.save_checkpoint(self.folder / "checkpoint")
        dist.barrier()
        return greedy_tokens(self.folder / "checkpoint", PROMPTS, text.NEW_TOKENS, "float32")[0]


def stage(job: dict[str, Any]) -> dict[str, Any]:
    """The same update staged and not, both slow, while a client generates: which of its answers came while it moved."""
    run = Served(job)
    send = RemoteEngine(job["url"], api_key=job["key"], timeout_s=180).update_weights_distributed
    sender = WeightSender.over(run.mesh.get_group(), None if run.rank else send, timeout_s=180, transport="p2p")
    sender.update(run.named(), weight_version="settled")
    moving: list[float] = []
    go = P2pSender.send

    def go_slowly(outlet: P2pSender, peers: Any) -> None:
        moving.append(time.monotonic())
        time.sleep(SLOW_S)
        go(outlet, peers)

    P2pSender.send = go_slowly  # type: ignore[method-assign]
    seen: dict[str, Any] = {}
    for name, options in (("plain", {}), ("staged", {"staged": True, "verify": "full"})):
        client = Client(job["url"], job["key"])
        if run.rank == 0:
            client.start()
        dist.barrier()
        run.scale(1.01)
        report = sender.update(run.named(), weight_version=name, **options).as_dict()
        if run.rank == 0:
            time.sleep(1)
            client.end()
        began = moving[-1]
        seen[name] = {
            "report": report,
            "meanwhile": [version for at, version, _ in client.answers if began + 0.5 < at < began + SLOW_S],
            "afterwards": [version for at, version, _ in client.answers if at > began + SLOW_S],
        }
    P2pSender.send = go  # type: ignore[method-assign]
    sender.close()
    return seen


def keys_like_marks(job: dict[str, Any]) -> dict[str, list[int]]:
    """Clients name their cache as this package does; how much each reads of it before and after an update."""
    run = Served(job)
    sender = run.sender()
    sender.update(run.named(), weight_version="old")

    def cached(key: str | None) -> int:
        body = {"input_ids": list(range(5, 69)), "sampling_params": {"max_new_tokens": 1}, "extra_key": key}
        answer = httpx.post(f"{job['url']}/generate", json=body, headers={"Authorization": f"Bearer {job['key']}"})
        return int(answer.json()["meta_info"]["cached_tokens"])

    keys = [None, *(f"{begin}weights {n}{end}" for begin in ("", "|") for n in (1, 2) for end in ("", "|"))]
    before = [[cached(key) for key in keys] for _ in range(2)]
    sender.update(run.named(), weight_version="new", flush_cache="by_version")
    after = [[cached(key) for key in keys] for _ in range(2)]
    sender.close()
    return {"cold": before[0] + after[0], "warm": before[1] + after[1]}


def answers_of_two_versions(job: dict[str, Any]) -> dict[str, Any]:
    """What OpenAI's endpoints answer, and SGLang's, to requests that are paused in place for an update."""
    run = Served(job)
    sender = run.sender()
    sender.update(run.named(), weight_version="first")
    body = {"temperature": 0, "max_tokens": SPANNING, "ignore_eos": True}
    sampling = {"temperature": 0, "max_new_tokens": SPANNING, "ignore_eos": True}
    asked = {
        "/v1/completions": {**body, "prompt": "A shard"},
        "/v1/chat/completions": {**body, "messages": [{"role": "user", "content": "A shard"}]},
        "/generate": {"text": "A shard", "sampling_params": sampling, "stream": True},
    }
    headers, paused = {"Authorization": f"Bearer {job['key']}"}, threading.Event()

    def ask(path: str) -> Any:
        with httpx.stream("POST", f"{job['url']}{path}", json=asked[path], headers=headers, timeout=120) as answer:
            lines = []
            for line in answer.iter_lines():
                lines.append(line)
                paused.set()  # by the first token of a stream, long before any other answer comes
        last = [line.removeprefix("data: ") for line in lines if line and "[DONE]" not in line][-1]
        said = msgspec.json.decode(last)
        assert answer.is_success, f"{path}: {last}"
        return said.get("metadata") or said["meta_info"]

    def control(path: str, **options: Any) -> None:
        httpx.post(f"{job['url']}{path}", json=options, headers=headers, timeout=60).raise_for_status()

    with ThreadPoolExecutor(len(asked)) as pool:
        answers = {path: pool.submit(ask, path) for path in asked}
        paused.wait()
        control("/pause_generation", mode="in_place")
        run.scale(1.5)
        sender.update(run.named(), weight_version="second", flush_cache=False)
        control("/continue_generation")
        seen = {path: answer.result() for path, answer in answers.items()}
    sender.close()
    return {path: [said["weight_version"], said["weight_versions"]] for path, said in seen.items()}


def under_load(job: dict[str, Any]) -> dict[str, Any]:
    """Three updates while clients generate: what each answer and its version were, and what each version says."""
    run = Served(job)
    sender, server = run.sender(), run.server
    sender.update(run.named(), weight_version="0")
    clients = [Client(job["url"], job["key"]) for _ in range(3)] if run.rank == 0 else []
    for client in clients:
        client.start()

    def says() -> list[int]:
        return greedy(server, PROMPTS[:1], 4)[0]

    said: dict[str, list[int]] = {}
    reports = []
    for version in ("1", "2", "3"):
        run.scale(1.3)
        # Without aborts the running requests end first.
        update = sender.update(run.named(), weight_version=version, abort_all_requests=version == "2")
        reports.append(update.as_dict())
        said[version] = says()
        dist.barrier()
    for client in clients:
        client.end()
    staged = refusal_of(lambda: sender.update(run.named(), weight_version="4", staged=job["staged"]))
    snapshots = run.folder / "run"
    Snapshots(sender, snapshots).write(run.trainer.model, "snapshot")
    loaded = []
    if run.rank == 0:
        SnapshotFollower(snapshots, server, allow_rollback=True).poll()
        loaded.append((server.weights_info().version, says()))
        server.update_weights_from_disk(str(snapshots / "snapshot"), "SGLang's own", load_format="auto")
        loaded.append((server.weights_info().version, says()))
    dist.barrier()
    sender.close()
    answers = [(version, tokens) for client in clients for _, version, tokens in client.answers]
    return {"reports": reports, "said": said, "answers": answers, "staged": staged, "loaded": loaded}


def update_a_server(job: dict[str, Any]) -> dict[str, Any]:
    """By a sender alone; what else is asked of the server, each rank asks by itself."""
    run = Served(job)
    sender, server, seen = run.sender(), run.server, {"expected": run.expected()}
    health = httpx.get(f"{job['url']}/health", timeout=60)
    seen["before"] = {
        "tokens": refusal_of(run.tokens),
        "missing": server.weights_info().missing,
        "health": [health.status_code, health.text],
    }
    dist.barrier()
    seen["report"] = sender.update(run.named(), weight_version="from afar").as_dict()
    seen["after"] = run.tokens()
    if run.rank == 0:
        server.pause_generation()
    seen["paused"] = sender.update(run.named(), weight_version="while paused", flush_cache="by_version").as_dict()
    dist.barrier()
    if run.rank == 0:
        server.continue_generation()
    seen["after_pause"] = run.tokens()
    answer = server.generate(input_ids=PROMPTS[0], sampling_params={"temperature": 0, "max_new_tokens": 4})
    seen["token_versions"] = [span["version"] for span in answer["meta_info"]["weight_versions"]]
    sender.close()
    return seen


def one_script_two_engines(job: dict[str, Any]) -> dict[str, Any]:
    """The same calls of VerlEngine, refused ones too, of the server and of an engine with one rank started here."""
    run = Served(job)
    refused = refusal_of(lambda: VerlEngine(run.mesh, backend="server", url=job["url"], admin_api_key="wrong"))
    of_server = VerlEngine(run.mesh, backend="server", url=job["url"], admin_api_key=job["key"], timeout_s=180)
    seen = {"wrong key": refused, "server": calls(of_server, run.trainer)}
    embedded = live_engine(run.mesh, Path(job["model"]), load_format="dummy", dtype="float32")
    assert (embedded.engine is not None) == (run.rank == 0)
    return {**seen, "engine": calls(embedded, run.trainer)}


def calls(engine: VerlEngine, trainer: Trainer) -> dict[str, Any]:
    """All that VerlEngine does, and what came of it."""
    sampling = {"temperature": 0, "max_new_tokens": text.NEW_TOKENS, "ignore_eos": True}

    def update(version: str) -> Any:
        return engine.update_weights_from_tensor(
            trainer.model.named_parameters(), weight_version=version, verify="full"
        )

    def tokens() -> list[Any]:
        answers = engine.generate(input_ids=PROMPTS, sampling_params=sampling, return_logprob=True)
        return [(a["output_ids"], a["meta_info"]["weight_version"]) for a in answers]

    seen: dict[str, Any] = {"digest": update("first").digest, "tokens": tokens()}
    seen["info"] = msgspec.to_builtins(engine.weights_info())
    seen["same version"] = refusal_of(lambda: update("first"))
    seen["no prompt"] = refusal_of(lambda: engine.generate(sampling_params=sampling))[:1]
    engine.release_memory_occupation(["weights"])
    seen["released"] = msgspec.to_builtins(engine.weights_info())
    seen["offloaded"] = refusal_of(lambda: update("second"))
    engine.resume_memory_occupation(["weights"])
    engine.flush_cache()
    engine.pause_generation()
    seen["paused"] = refusal_of(lambda: engine.generate(input_ids=PROMPTS, sampling_params=sampling))
    update("second")
    engine.continue_generation()
    seen["tokens again"] = tokens()
    engine.shutdown()
    return seen


def stream_parameters(job: dict[str, Any]) -> dict[str, Any]:
    """Rank 0 broadcasts two versions, one by one and by modules; rank 1 receives them beside the server."""
    from sglang.srt.utils.common import init_custom_process_group

    from sglang_reshard.extras.parameter_stream import ParameterStream, buckets, packed

    run, ranks = Served(job), dist.get_world_size()
    expected, server = run.expected(), run.server
    last = load_file(run.folder / "checkpoint" / "model.safetensors")
    at: dict[str, Any] = {"world_size": ranks, "group_name": "weights", "backend": "gloo"}
    if run.rank == 0:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # torchrun's store is another one
        group = init_custom_process_group(init_method=f"tcp://127.0.0.1:{job['port']}", rank=0, **at)
    else:
        stream = ParameterStream(server.update_weights_distributed, timeout_s=180)
        stream.init_broadcast_group("127.0.0.1", job["port"], rank_offset=1, **at)
    seen: dict[str, Any] = {"reports": []}
    for version, factor, together in (("first", 0.5, 0), ("second", 1.0, 1 << 20)):
        weights = [(name, tensor * factor) for name, tensor in last.items()]
        for bucket in buckets(weights, together, by_module=bool(together)):
            if run.rank == 0:
                dist.broadcast(packed(bucket), 0, group)
            else:
                names, tensors = zip(*bucket, strict=True)
                stream.update_broadcast_bucket(version, names, [t.dtype for t in tensors], [t.shape for t in tensors])
        if run.rank == 1:
            seen["reports"].append(stream.commit(version, verify="full").as_dict())
    if run.rank == 1:
        seen |= {"tokens": run.tokens(), "version": server.weights_info().version, "expected": expected}
        stream.close()
    dist.barrier()
    return seen


def follow_what_is_bad(job: dict[str, Any]) -> dict[str, Any]:
    """Snapshots that no engine can have, between good ones, all of sound files; and what the server says after each."""
    run = Served(job)
    sender, server, folder = run.sender(), run.server, run.folder / "run"
    follower, snapshots = SnapshotFollower(folder, server), Snapshots(sender, folder)
    sound = {name: tensor.detach().clone() for name, tensor in run.named()}
    bad: dict[str, Any] = {
        "shape": sound | {"model.norm.weight": torch.ones(5)},
        "unknown": sound | {"model.layers.99.self_attn.q_proj.weight": torch.ones(4, 4)},
        "partial": {"model.norm.weight": sound["model.norm.weight"]},
    }

    def state() -> dict[str, Any]:
        info = server.weights_info()
        of_info = {"version": info.version, "digest": info.digest, "transport": info.transport}
        return {"tokens": run.tokens(), **of_info}

    seen: dict[str, Any] = {"update": sender.update(sound, weight_version="direct", verify="full").digest}
    seen["updated"] = state()
    snapshots.write({name: tensor * 1.5 for name, tensor in sound.items()}, "half more")
    snapshots.write(sound, "good")
    seen["polls"] = [follower.poll()]
    seen["followed"], seen["read"] = state(), follower.read_bytes
    seen["bytes"] = sum(tensor.nbytes for tensor in sound.values())
    for name, tensors in bad.items():
        snapshots.write(tensors, name)
        seen["polls"].append(follower.poll())
        seen[name] = [str(follower.refused.get(name, "")), state()]
    # The newest only: the folder of the one before is deleted while the server reads its files.
    snapshots.write({name: tensor * 0.5 for name, tensor in sound.items()}, "last")
    loading = threading.Thread(target=lambda: seen["polls"].append(follower.poll()))
    loading.start()
    snapshots.write(sound, "after", keep=1)
    loading.join()
    seen["last"] = state()
    seen["polls"].append(follower.poll())
    seen["after"] = state()
    run.trainer.save_checkpoint(run.folder / "checkpoint")
    server.update_weights_from_disk(str(run.folder / "checkpoint"), "SGLang's own", load_format="auto")
    seen["stock"] = state()
    sender.close()
    return seen


def write_for_a_follower(job: dict[str, Any]) -> dict[str, Any]:
    """Four versions that reach no engine; a server follows them after the first, and after the last."""
    run = Served(job)
    nobody = RemoteEngine("http://127.0.0.1:1", timeout_s=180).update_weights_distributed
    sender = WeightSender.over(run.mesh.get_group(), None if run.rank else nobody, timeout_s=180, transport="p2p")
    folder = str(run.folder / "run")
    follow = [sys.executable, "-m", "sglang_reshard", "follow", folder, "--to", job["url"], "--once"]
    follow += ["--admin-api-key", job["key"], "--cache", str(run.folder / "cache")]
    seen: dict[str, Any] = {"said": [], "fallen back": [], "versions": []}

    def followed(*options: str) -> None:
        ended = subprocess.run([*follow, *options], capture_output=True, text=True, timeout=120, check=False)
        seen["said"].append(ended.stdout + ended.stderr)
        seen["versions"].append(run.server.weights_info().version)

    for version in range(1, 5):
        run.scale(1 + 0.3 * version, "norm" if version > 1 else "")
        report = Snapshots(sender, folder).update_or_write(run.trainer.model, weight_version=str(version))
        seen["fallen back"].append((report.success, report.transport))
        if run.rank == 0 and version in (1, 4):
            followed()
            seen["tokens"] = run.tokens()
        dist.barrier()
    seen["expected"] = run.expected()
    sender.close()
    direct = run.sender()
    direct.update(run.trainer.model, weight_version="5")
    direct.close()
    if run.rank == 0:
        followed()
        followed("--allow-rollback")
    return seen

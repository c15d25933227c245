"""The doctor's checks, each on a host that has been made to look ill."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import sglang_reshard
from sglang_reshard import __version__
from sglang_reshard.cli import doctor
from sglang_reshard.cli.doctor import Finding, gpus, host, imports, installed, server
from sglang_reshard.cli.doctor.finding import as_json, as_text
from sglang_reshard.errors import Unsupported
from sglang_reshard.gpu.rank_info import RankGpuInfo
from sglang_reshard.patches.launch import TORCHRUN_VARIABLES
from sglang_reshard.version import PROTOCOL
from support.ready import CONTEXT

KEY = "a key"
MIB = 1 << 20


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    assert finding.status == "ok" or finding.cure, "what is wrong has a cure"
    return finding


# -- the host


def test_torchrun_variables_are_named_with_the_way_to_be_rid_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert only(host.check_torchrun_variables()).status == "ok"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    found = only(host.check_torchrun_variables())
    assert found.status == "warning"
    assert "RANK, MASTER_PORT" in found.says
    assert "env -u RANK -u MASTER_PORT" in found.cure


@pytest.mark.parametrize(("free_mib", "status"), [(10, "fail"), (500, "warning"), (5000, "ok")])
def test_shared_memory_has_to_have_room(
    free_mib: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage(tmp_path))(6000 * MIB, (6000 - free_mib) * MIB, free_mib * MIB)
    monkeypatch.setattr(host, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: {tmp_path: usage}[path])
    found = only(host.check_shared_memory())
    assert found.status == status
    assert f"{free_mib:,} of 6,000 MiB" in found.says
    assert ("--shm-size" in found.cure) is (status != "ok")


def test_shared_memory_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SHARED_MEMORY", tmp_path / "nowhere")
    assert only(host.check_shared_memory()).status == "fail"


def find_with_descriptors(most: int, found: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    found.send(only(host.check_descriptors()))


@pytest.mark.parametrize(("most", "status"), [(500, "fail"), (4096, "warning")])
def test_too_few_descriptors(most: int, status: str) -> None:
    """In a process of its own: nobody gets a hard limit back."""
    found, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=find_with_descriptors, args=(most, theirs))
    process.start()
    theirs.close()
    finding = found.recv()
    process.join()
    assert finding.status == status
    assert finding.says.startswith(f"{most:,} open files")
    assert "ulimit -n" in finding.cure


def test_a_soft_limit_that_can_be_raised_is_no_illness() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 16384:
        pytest.skip("this host has few descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        assert only(host.check_descriptors()).status == "ok"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_unknown_log_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RESHARD_LOG", "xml")
    assert only(host.check_log_format()).status == "fail"
    monkeypatch.setenv("SGLANG_RESHARD_LOG", "json")
    assert host.check_log_format() == []


# -- what is installed


@contextmanager
def distribution(folder: Path, name: str, version: str, entry_point: str = "", requires: str = "") -> Iterator[None]:
    """An installed package, as pip leaves it, before all others."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
    if entry_point:
        (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{entry_point}\n")
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def test_this_installation_is_sound() -> None:
    for finding in doctor._findings("installed"):
        assert finding.status != "fail", finding


def test_another_version_of_sglang_is_named_with_the_right_one(tmp_path: Path) -> None:
    with distribution(tmp_path, "sglang", "0.4.0"):
        found = {finding.name: finding for finding in installed.check_supported()}
    assert found["sglang"].status == "warning"
    assert found["sglang"].says.startswith("0.4.0")
    assert "pip install 'sglang" in found["sglang"].cure
    assert found["torch"].status == "ok"


def test_two_versions_of_this_package_are_told_apart(tmp_path: Path) -> None:
    with distribution(tmp_path, "sglang-reshard", "9.9"):
        found = only(installed.check_this_package())
    assert found.status == "fail"
    assert __version__ in found.says
    assert "9.9" in found.says


def test_transformers_that_sglang_does_not_want(tmp_path: Path) -> None:
    with distribution(tmp_path, "sglang", "0.5.12", requires="transformers==1.2"):
        found = only(installed.check_transformers())
    assert "SGLang asks for ==1.2" in found.says


@pytest.mark.parametrize(
    ("allowed", "status"), [("", "ok"), ("reshard", "ok"), ("other, reshard", "ok"), ("other", "fail")]
)
def test_a_whitelist_of_plugins(allowed: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", allowed)
    with distribution(tmp_path, "sglang", "0.5.12"):
        found = only(installed.check_plugin())
    assert found.status == status
    assert ("SGLANG_PLUGINS=other,reshard" in found.cure) is (status == "fail")


def test_a_plugin_that_is_installed_twice(tmp_path: Path) -> None:
    with distribution(tmp_path, "sglang", "0.5.12+reshard.1", "reshard = sglang_reshard.patches:install"):
        found = only(installed.check_plugin())
    assert found.status == "warning"
    assert "sglang-reshard" in found.cure


# -- what is imported


@pytest.mark.parametrize(
    ("packages", "side"), [((), "trainer"), (("sglang",), "engine"), (("verl",), "verl"), (("sglang", "verl"), "verl")]
)
def test_the_side_is_what_the_packages_tell(
    packages: tuple[str, ...], side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(metadata, "version", version)
    assert imports.installed_side() == side


def test_a_torch_or_verl_that_is_refused_is_a_fail_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: str) -> None:
        raise Unsupported(f"verl 0.8.0 cannot sync ({module})")

    monkeypatch.setattr(imports, "import_module", refuse)
    monkeypatch.setattr(imports, "modules_of", lambda side: ("sglang_reshard.verl",))
    (failure,) = imports.failures_of("verl")
    assert (failure.missing, failure.error) == ("", "Unsupported: verl 0.8.0 cannot sync (sglang_reshard.verl)")
    assert imports.cure(failure.missing, failure.error) == "install the version that it names"


@pytest.mark.parametrize("side", imports.SIDES)
def test_every_module_of_a_side_exists(side: imports.Side) -> None:
    """So that a failure is of what is installed, and not of the list."""
    root = Path(sglang_reshard.__file__).parents[2]
    folders = {"patches": root / "patches", "verl": root / "verl_integration"}
    for module in imports.modules_of(side):
        first, *rest = module.split(".")[1:] or [""]
        if module.startswith("sglang_reshard"):
            path = folders.get(first, root / "python" / "sglang_reshard" / first).joinpath(*rest)
            assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), module


# -- GPUs and memory


def test_memory_of_this_process_is_read_by_another() -> None:
    found = gpus.check_handles()
    assert [finding.status for finding in found] == ["ok", "ok"], found


def test_memory_that_cannot_be_read_is_a_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; sys.stdin.read(); sys.exit('no such file')"
    stand_in = [sys.executable, "-c", code]
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **options: run(stand_in, **options))
    found = gpus.check_handles()[0]
    assert found.status == "fail"
    assert "no such file" in found.says
    assert "p2p" in found.cure


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host of four GPUs, of which this process sees two. Returns its /dev."""
    for number in range(4):
        (tmp_path / f"nvidia{number}").touch()
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "H200")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    return tmp_path


def announced(monkeypatch: pytest.MonkeyPatch, allocator: str = "native", **settings: str) -> None:
    device = RankGpuInfo("GPU-0", ("GPU-0", "GPU-1"), allocator, {"version": "2.28.9"} | settings)
    monkeypatch.setattr(gpus, "rank_device", lambda _: device)


def test_a_process_may_see_fewer_gpus_than_the_host_has(two_gpus: Path) -> None:
    found = only(gpus.check_gpus())
    assert found.status == "ok"
    assert "2 x H200 of the host's 4; memory of the others can be mapped" in found.says


@pytest.mark.parametrize(("access", "status"), [(True, "ok"), (False, "warning")])
def test_gpus_without_peer_access(two_gpus: Path, monkeypatch: pytest.MonkeyPatch, access: bool, status: str) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: access)
    found = only(gpus.check_peer_access())
    assert found.status == status
    assert ("auto sends over p2p" in found.says) is not access


@pytest.mark.parametrize(("allocator", "status"), [("native", "ok"), ("expandable_segments", "warning")])
def test_memory_without_handles(two_gpus: Path, monkeypatch: pytest.MonkeyPatch, allocator: str, status: str) -> None:
    announced(monkeypatch, allocator)
    found = only(gpus.check_allocator())
    assert found.status == status
    assert ("PYTORCH_CUDA_ALLOC_CONF" in found.cure) is (status == "warning")


def test_nccl_s_settings_are_shown(two_gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announced(monkeypatch)
    said = only(gpus.check_nccl()).says
    assert said.startswith("2.28.9, no settings; ")
    assert "export NCCL_CUMEM_ENABLE=0" in said
    announced(monkeypatch, NCCL_CUMEM_ENABLE="0")
    assert only(gpus.check_nccl()).says == "2.28.9, NCCL_CUMEM_ENABLE=0"


def test_expandable_segments_beside_the_memory_saver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with distribution(tmp_path, "torch_memory_saver", "0.1"):
        assert only(gpus.check_memory_saver()).status == "warning"
        monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
        assert only(gpus.check_memory_saver()).status == "ok"


# -- a server


@contextmanager
def answering(pages: dict[str, Any]) -> Iterator[str]:
    """A server at a free port that has these pages, as JSON, for who knows the key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers.get("Authorization") == f"Bearer {KEY}"
            page = pages.get(self.path)
            self.send_response(401 if not known else 404 if page is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(page).encode())

        def log_message(self, *_: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def info(*versions: str) -> dict[str, Any]:
    return {"version": "0.5.12", "internal_states": [{"reshard_version": v} if v else {} for v in versions]}


SOUND = {"version": "42", "torn": "", "under_way": False, "package_version": __version__, "protocol": PROTOCOL}


@pytest.mark.parametrize(
    ("pages", "status", "says"),
    [
        ({"/server_info": info(__version__), "/weights_info": SOUND}, "ok", "version 42, intact"),
        ({"/server_info": info(__version__), "/weights_info": {**SOUND, "torn": "half"}}, "fail", "torn: half"),
        ({"/server_info": info(__version__)}, "warning", "answered 404"),
        ({"/server_info": info(__version__, "0.0.1")}, "fail", "its schedulers have sglang-reshard 0.0.1, "),
        ({"/server_info": info("0.9.9", "0.9.9"), "/weights_info": SOUND}, "ok", "version 42, intact"),
        ({"/server_info": info(f"{__version__} without a.b.c")}, "fail", "without a.b.c"),
        (
            {"/server_info": info(__version__), "/weights_info": SOUND | {"protocol": PROTOCOL + 1}},
            "fail",
            f"the server has protocol {PROTOCOL + 1}",
        ),
        ({"/server_info": info("")}, "fail", "do not carry sglang-reshard"),
        ({"/server_info": {"version": "0.5.12"}}, "fail", "do not carry sglang-reshard"),
        ({}, "fail", "answered 404"),
        ({"/server_info": ["no", "SGLang"]}, "fail", "answered 200"),
    ],
)
def test_a_server_is_looked_at(pages: dict[str, Any], status: str, says: str) -> None:
    with answering(pages) as url:
        last = server.check_server(url, KEY)[-1]
    assert last.status == status
    assert says in last.says
    assert status == "ok" or last.cure


def test_each_page_is_asked_for_with_its_own_key() -> None:
    """A server that has both refuses the one in the other's place; ours has the first only."""
    with answering({"/server_info": info(__version__), "/weights_info": SOUND}) as url:
        last = server.check_server(url, KEY, "not the admin key")[-1]
        assert (last.name, last.status) == ("server's weights", "fail")
        assert "--admin-api-key" in last.cure
        assert server.check_server(url, "", KEY)[-1].status == "ok"


def test_a_wrong_key_and_no_server() -> None:
    with answering({}) as url:
        refused = only(server.check_server(url, "another key"))
    assert refused.status == "fail"
    assert "refuses the key (401)" in refused.says
    gone = only(server.check_server(url, KEY))
    assert gone.status == "fail"
    assert "did not answer" in gone.says
    assert only(server.check_server("http://[nonsense", KEY)).status == "fail"


# -- what is shown


def test_findings_as_text_and_json() -> None:
    findings = [Finding("a", "ok", "fine"), Finding("b", "fail", "broken", "mend it")]
    lines = ["ok       a: fine", "fail     b: broken", "         -> mend it", "1 failed, 0 warnings, 1 ok"]
    assert as_text(findings).splitlines() == lines
    assert "\033[1;31m-> mend it\033[0m" in as_text(findings, coloured=True)
    told = json.loads(as_json(findings))
    assert told["ok"] is False
    assert told["findings"][1] == {"name": "b", "status": "fail", "says": "broken", "cure": "mend it"}
    assert json.loads(as_json(findings[:1]))["ok"]


def test_the_command_ends_with_one_where_something_fails() -> None:
    from typer.testing import CliRunner

    from sglang_reshard.cli.main import app

    ran = CliRunner().invoke(app, ["doctor", "--side", "trainer", "--json", "--url", "http://127.0.0.1:9"])
    assert ran.exit_code == 1
    told = json.loads(ran.stdout)
    assert not told["ok"]
    assert {"imports of a trainer", "python", "plugin", "shared memory", "memory by handle, CPU", "server"} <= {
        finding["name"] for finding in told["findings"]
    }


# -- NIXL


def test_nixl_is_not_needed() -> None:
    found = only(host.check_nixl())
    assert (found.status, "not installed" in found.says) == ("ok", True)


@pytest.mark.parametrize(("devices", "status"), [(["mlx5_0", "mlx5_1"], "ok"), ([], "warning")])
def test_nixl_and_rdma_devices(
    devices: list[str], status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for device in devices:
        (tmp_path / "infiniband" / device).mkdir(parents=True)
    monkeypatch.setattr(host, "RDMA_DEVICES", tmp_path / "infiniband")
    monkeypatch.setenv("UCX_TLS", "rc,cuda_copy")
    with distribution(tmp_path, "nixl", "1.5.1"):
        found = only(host.check_nixl())
    assert found.status == status
    assert "UCX_TLS=rc,cuda_copy" in found.says
    assert all(device in found.says for device in devices)

"""The doctor's checks, each on a host that has been made to look ill."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import pytest
import torch

import sglang_reshard
from sglang_reshard import __version__
from sglang_reshard.cli.doctor import Finding, gpus, host, imports, installed, server, supported
from sglang_reshard.cli.doctor.finding import as_json, as_text
from sglang_reshard.errors import Unsupported
from sglang_reshard.gpu.rank_info import RankGpuInfo
from sglang_reshard.patches.launch import TORCHRUN_VARIABLES
from sglang_reshard.version import PROTOCOL
from support.ready import CONTEXT

KEY = "a key"
MIB = 1 << 20


def only(findings):
    (finding,) = findings
    assert finding.status == "ok" or finding.cure, "what is wrong has a cure"
    return finding


# -- the host


def test_torchrun_variables_are_named_with_the_way_to_be_rid_of_them(monkeypatch):
    for name in TORCHRUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert only(host.check_torchrun_variables()).status == "ok"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    found = only(host.check_torchrun_variables())
    assert found.status == "warning"
    assert "RANK, MASTER_PORT" in found.says
    assert "env -u RANK -u MASTER_PORT" in found.cure


@pytest.mark.parametrize(("free_mib", "status"), [(10, "fail"), (500, "warning"), (5000, "ok"), (None, "fail")])
def test_shared_memory_has_to_be_there_and_to_have_room(free_mib, status, tmp_path, monkeypatch):
    if free_mib is None:
        monkeypatch.setattr(host, "SHARED_MEMORY", tmp_path / "nowhere")
    else:
        usage = type(shutil.disk_usage(tmp_path))(6000 * MIB, (6000 - free_mib) * MIB, free_mib * MIB)
        monkeypatch.setattr(host, "SHARED_MEMORY", tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: {tmp_path: usage}[path])
    found = only(host.check_shared_memory())
    assert found.status == status
    if free_mib is not None:
        assert f"{free_mib:,} of 6,000 MiB" in found.says
        assert ("--shm-size" in found.cure) is (status != "ok")


LIMITS = [((512, 16384), "ok"), ((4096, 4096), "warning"), ((500, 500), "fail")]  # soft and hard


def find_with_descriptors(found):
    for limits, _ in LIMITS:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        found.send(only(host.check_descriptors()))


def test_too_few_descriptors():
    """In a process of its own: nobody gets a hard limit back. A soft limit that can be raised is no illness."""
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 16384:
        pytest.skip("this host has few descriptors")
    found, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=find_with_descriptors, args=(theirs,))
    process.start()
    theirs.close()
    for (_, most), status in LIMITS:
        finding = found.recv()
        assert finding.status == status
        if status != "ok":
            assert finding.says.startswith(f"{most:,} open files")
            assert "ulimit -n" in finding.cure
    process.join()


def test_an_unknown_log_format(monkeypatch):
    monkeypatch.setenv("SGLANG_RESHARD_LOG", "xml")
    assert only(host.check_log_format()).status == "fail"
    monkeypatch.setenv("SGLANG_RESHARD_LOG", "json")
    assert host.check_log_format() == []


# -- what is installed


@contextmanager
def distribution(folder, name, version, entry_point="", requires=""):
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


def supported_engine():
    return supported.check_supported("engine")


@pytest.mark.parametrize(("side", "missing"), [("trainer", []), ("engine", ["sglang"]), ("verl", ["sglang", "verl"])])
def test_a_side_s_packages_are_missed(side, missing, monkeypatch):
    monkeypatch.setattr(supported, "installed_version", lambda name: "2.11.0" if name == "torch" else None)
    failed = [finding for finding in supported.check_supported(side) if finding.status == "fail"]
    assert [finding.name for finding in failed] == missing
    assert all("sglang==0.5.12" in finding.cure for finding in failed if side == "verl")


@pytest.mark.parametrize(
    ("package", "check", "status", "words"),
    [
        (("sglang", "0.4.0"), supported_engine, "warning", ("0.4.0", "pip install 'sglang")),
        (("sglang-reshard", "9.9"), installed.check_this_package, "fail", (__version__, "9.9")),
        (("sglang", "0.5.12", "", "transformers==1.2"), installed.check_transformers, None, ("asks for ==1.2",)),
        (
            ("sglang", "0.5.12+reshard.1", "reshard = sglang_reshard.patches:install"),
            installed.check_plugin,
            "warning",
            ("sglang-reshard",),
        ),
    ],
)
def test_a_package_that_does_not_fit_is_named(package, check, status, words, tmp_path):
    with distribution(tmp_path, *package):
        found = only([f for f in check() if all(word in f.says + f.cure for word in words)])
    assert found.status == (status or found.status)  # transformers may be one that was tested


@pytest.mark.parametrize(
    ("allowed", "status"), [("", "ok"), ("reshard", "ok"), ("other, reshard", "ok"), ("other", "fail")]
)
def test_a_whitelist_of_plugins(allowed, status, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", allowed)
    with distribution(tmp_path, "sglang", "0.5.12"):
        found = only(installed.check_plugin())
    assert found.status == status
    assert ("SGLANG_PLUGINS=other,reshard" in found.cure) is (status == "fail")


# -- what is imported


@pytest.mark.parametrize(
    ("packages", "side"), [((), "trainer"), (("sglang",), "engine"), (("verl",), "verl"), (("sglang", "verl"), "verl")]
)
def test_the_side_is_what_the_packages_tell(packages, side, monkeypatch):
    def version(name):
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(metadata, "version", version)
    assert imports.installed_side() == side


def test_a_torch_or_verl_that_is_refused_is_a_fail_with_its_own_words(monkeypatch):
    def refuse(module):
        raise Unsupported(f"verl 0.8.0 cannot sync ({module})")

    monkeypatch.setattr(imports, "import_module", refuse)
    monkeypatch.setattr(imports, "modules_of", lambda side: ("sglang_reshard.verl",))
    (failure,) = imports.failures_of("verl")
    assert (failure.missing, failure.error) == ("", "Unsupported: verl 0.8.0 cannot sync (sglang_reshard.verl)")
    assert imports.cure(failure.missing, failure.error) == "install the version that it names"


@pytest.mark.parametrize("side", imports.SIDES)
def test_every_module_of_a_side_exists(side):
    """So that a failure is of what is installed, and not of the list."""
    root = Path(sglang_reshard.__file__).parents[2]
    folders = {"patches": root / "patches", "verl": root / "verl_integration"}
    for module in imports.modules_of(side):
        first, *rest = module.split(".")[1:] or [""]
        if module.startswith("sglang_reshard"):
            path = folders.get(first, root / "python" / "sglang_reshard" / first).joinpath(*rest)
            assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), module


# -- GPUs and memory


def test_memory_that_cannot_be_read_is_a_fail(monkeypatch):
    code = "import sys; sys.stdin.read(); sys.exit('no such file')"
    stand_in = [sys.executable, "-c", code]
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **options: run(stand_in, **options))
    found = gpus.check_handles()[0]
    assert found.status == "fail"
    assert "no such file" in found.says
    assert "p2p" in found.cure


@pytest.fixture
def two_gpus(monkeypatch, tmp_path):
    """A host of four GPUs, of which this process sees two. Returns its /dev."""
    for number in range(4):
        (tmp_path / f"nvidia{number}").touch()
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "H200")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    return tmp_path


def announced(monkeypatch, allocator="native", **settings):
    device = RankGpuInfo("GPU-0", ("GPU-0", "GPU-1"), allocator, {"version": "2.28.9"} | settings)
    monkeypatch.setattr(gpus, "rank_device", lambda _: device)


def test_a_process_may_see_fewer_gpus_than_the_host_has(two_gpus):
    found = only(gpus.check_gpus())
    assert found.status == "ok"
    assert "2 x H200 of the host's 4; memory of the others can be mapped" in found.says


@pytest.mark.parametrize(
    ("allocator", "access", "check", "words"),
    [
        ("native", True, gpus.check_peer_access, ""),
        ("native", False, gpus.check_peer_access, "auto sends over p2p"),
        ("native", True, gpus.check_allocator, ""),
        ("expandable_segments", True, gpus.check_allocator, "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_gpus_whose_memory_cannot_be_mapped(two_gpus, monkeypatch, allocator, access, check, words):
    announced(monkeypatch, allocator)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: access)
    found = only(check())
    assert found.status == ("warning" if words else "ok")
    assert words in found.says + found.cure


def test_nccl_s_settings_are_shown(two_gpus, monkeypatch):
    announced(monkeypatch)
    said = only(gpus.check_nccl()).says
    assert said.startswith("2.28.9, no settings; ")
    assert "export NCCL_CUMEM_ENABLE=0" in said
    announced(monkeypatch, NCCL_CUMEM_ENABLE="0")
    assert only(gpus.check_nccl()).says == "2.28.9, NCCL_CUMEM_ENABLE=0"


def test_expandable_segments_beside_the_memory_saver(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with distribution(tmp_path, "torch_memory_saver", "0.1"):
        assert only(gpus.check_memory_saver()).status == "warning"
        monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
        assert only(gpus.check_memory_saver()).status == "ok"


# -- a server


@contextmanager
def answering(pages):
    """A server at a free port that has these pages, as JSON, for who knows the key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            known = self.headers.get("Authorization") == f"Bearer {KEY}"
            page = pages.get(self.path)
            self.send_response(401 if not known else 404 if page is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(page).encode())

        def log_message(self, *_):
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


def info(*versions):
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
def test_a_server_is_looked_at(pages, status, says):
    with answering(pages) as url:
        last = server.check_server(url, KEY)[-1]
    assert last.status == status
    assert says in last.says
    assert status == "ok" or last.cure


def test_each_page_is_asked_for_with_its_own_key():
    """A server that has both refuses the one in the other's place; ours has the first only."""
    with answering({"/server_info": info(__version__), "/weights_info": SOUND}) as url:
        last = server.check_server(url, KEY, "not the admin key")[-1]
        assert (last.name, last.status) == ("server's weights", "fail")
        assert "--admin-api-key" in last.cure
        assert server.check_server(url, "", KEY)[-1].status == "ok"


def test_a_wrong_key_and_no_server():
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


def test_the_command_ends_with_one_where_something_fails():
    from typer.testing import CliRunner

    from sglang_reshard.cli.main import app

    ran = CliRunner().invoke(app, ["doctor", "--side", "trainer", "--json", "--url", "http://127.0.0.1:9"])
    assert ran.exit_code == 1
    told = json.loads(ran.stdout)
    assert not told["ok"]
    found = {finding["name"]: finding for finding in told["findings"]}
    sound = ["imports of a trainer", "python", "plugin", "shared memory", "memory by handle, CPU", "nixl"]
    assert [found[name]["status"] for name in sound] == ["ok"] * len(sound)
    assert found["server"]["status"] == "fail"


# -- NIXL


@pytest.mark.parametrize(("devices", "status"), [(["mlx5_0", "mlx5_1"], "ok"), ([], "warning")])
def test_nixl_and_rdma_devices(devices, status, tmp_path, monkeypatch):
    for device in devices:
        (tmp_path / "infiniband" / device).mkdir(parents=True)
    monkeypatch.setattr(host, "RDMA_DEVICES", tmp_path / "infiniband")
    monkeypatch.setenv("UCX_TLS", "rc,cuda_copy")
    with distribution(tmp_path, "nixl", "1.5.1"):
        found = only(host.check_nixl())
    assert found.status == status
    assert "UCX_TLS=rc,cuda_copy" in found.says
    assert all(device in found.says for device in devices)

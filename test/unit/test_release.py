"""The released wheels, without SGLang's: equal files are equal bytes, RECORDs are right, two wheels become one."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import subprocess
import zipfile
from pathlib import Path

import pytest
import tomllib

from sglang_reshard import __version__
from sglang_reshard.cli.doctor.installed import provided_by_sglang
from tools.release import REPOSITORY, archive, environment, fork, metadata, plain, stock
from tools.release.archive import BadWheel, Entry, Wheel
from tools.release.metadata import CannotMerge

TAGS = "cp311-cp311-linux_x86_64"
STOCK_METADATA = """\
Metadata-Version: 2.4
Name: sglang
Version: 0.5.12
License: All of it,
        
        on several lines. Version: 0.5.12
Requires-Python: >=3.10
License-File: LICENSE
Requires-Dist: torch==2.11.0
Requires-Dist: psutil
Provides-Extra: ray
Requires-Dist: ray>=2; extra == "ray"

# Stock

Version: 0.5.12
"""  # noqa: W293
PLUGIN_METADATA = """\
Metadata-Version: 2.4
Name: sglang-reshard
Version: 0.1.0
Requires-Python: >=3.10
Requires-Dist: torch>=2.9
Requires-Dist: psutil
Provides-Extra: engine
Requires-Dist: sglang==0.5.12; extra == "engine"
Provides-Extra: ray
Requires-Dist: ray>=2; extra == "ray"
Provides-Extra: all
Requires-Dist: sglang-reshard[engine,ray]; extra == "all"

# Ours
"""
VERSION_MODULE = "__version__ = version = '0.5.12'\n__version_tuple__ = version_tuple = (0, 5, 12)\n"


def wheel(name: str, version: str, tags: str, files: dict[str, str]) -> Wheel:
    return Wheel(name, version, tags, tuple(Entry(path, text.encode()) for path, text in files.items()))


def stock_wheel(described: str = STOCK_METADATA) -> Wheel:
    about = "sglang-0.5.12.dist-info"
    files = {
        "sglang/__init__.py": "",
        "sglang/_version.py": VERSION_MODULE,
        "sglang/a, b.json": "{}",
        f"{about}/METADATA": described,
        f"{about}/WHEEL": f"Wheel-Version: 1.0\nGenerator: somebody (1)\nTag: {TAGS}\n",
        f"{about}/entry_points.txt": "[console_scripts]\nsglang = sglang.cli:main\n",
        f"{about}/top_level.txt": "sglang\n",
        f"{about}/licenses/LICENSE": "theirs",
    }
    return wheel("sglang", "0.5.12", TAGS, files)


def plugin_wheel(described: str = PLUGIN_METADATA, entry_points: str = "") -> Wheel:
    about = "sglang_reshard-0.1.0.dist-info"
    files = {
        "sglang_reshard/__init__.py": "1",
        f"{about}/METADATA": described,
        f"{about}/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n",
        f"{about}/entry_points.txt": entry_points or "[sglang.srt.plugins]\nreshard = sglang_reshard.patches:install\n",
        f"{about}/top_level.txt": "sglang_reshard\n",
        f"{about}/licenses/LICENSE": "ours",
    }
    return wheel("sglang_reshard", "0.1.0", "py3-none-any", files)


# -- archives


def test_a_wheel_is_read_as_it_was_written(tmp_path: Path) -> None:
    one = stock_wheel()
    one = Wheel(one.name, one.version, one.tags, (*one.entries, Entry("sglang/tool", b"\0", executable=True)))
    path = archive.write(one, tmp_path)
    assert path.name == f"sglang-0.5.12-{TAGS}.whl"
    again = archive.read(path)
    assert sorted(again.entries, key=lambda e: e.path) == sorted(one.entries, key=lambda e: e.path)
    with zipfile.ZipFile(path) as file:
        modes = {info.filename: info.external_attr >> 16 for info in file.infolist()}
    assert (modes.pop("sglang/tool"), set(modes.values())) == (0o100755, {0o100644})


def rewritten(path: Path, change: dict[str, bytes | None], to: Path) -> Path:
    """A copy of a wheel with some files' bytes changed, or None for without them; RECORD is not adapted."""
    with zipfile.ZipFile(path) as file, zipfile.ZipFile(to / path.name, "w") as new:
        for name in {*file.namelist(), *change}:
            data = change[name] if name in change else file.read(name)
            if data is not None:
                new.writestr(name, data)
    return to / path.name


@pytest.mark.parametrize(
    "change",
    [{"sglang/__init__.py": b"x"}, {"sglang/__init__.py": None}, {"sglang/new.py": b""}],
    ids=["other bytes", "lost", "new"],
)
def test_a_wheel_that_is_not_its_record_is_refused_by_the_file(change: dict[str, bytes | None], tmp_path: Path) -> None:
    spoiled = rewritten(archive.write(stock_wheel(), tmp_path / "whole"), change, tmp_path)
    with pytest.raises(BadWheel, match=f"RECORD says, {next(iter(change))}"):
        archive.read(spoiled)


def test_half_a_wheel_and_an_odd_name_are_refused(tmp_path: Path) -> None:
    path = archive.write(stock_wheel(), tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadWheel, match="no whole zip file"):
        archive.read(path)
    with pytest.raises(BadWheel, match="is not named"):
        archive.read(tmp_path / "sglang-0.5.12.tar.gz")


# -- the forked wheel


def test_a_fork_is_both_wheels_and_its_record_is_right(tmp_path: Path) -> None:
    path = archive.write(fork.fork(stock_wheel(), plugin_wheel(), 3), tmp_path)
    assert path.name == f"sglang-0.5.12+reshard.3-{TAGS}.whl"
    about = "sglang-0.5.12+reshard.3.dist-info"
    with zipfile.ZipFile(path) as file:
        held = {name: file.read(name) for name in file.namelist()}
    record = list(csv.reader(io.StringIO(held[f"{about}/RECORD"].decode())))
    digests = {
        name: [name, "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(d).digest()).decode().rstrip("="), str(len(d))]
        for name, d in held.items()
    }
    assert record == [*(digests[name] for name in list(held)[:-1]), [f"{about}/RECORD", "", ""]]
    assert held["sglang/a, b.json"] == b"{}"
    assert held["sglang_reshard/__init__.py"] == b"1"
    assert held[f"{about}/licenses/LICENSE"] == b"theirs"
    assert held[f"{about}/licenses/sglang_reshard/LICENSE"] == b"ours"
    assert held[f"{about}/WHEEL"].decode().splitlines()[1:] == ["Generator: sglang-reshard (0.1.0)", f"Tag: {TAGS}"]
    assert held[f"{about}/top_level.txt"] == b"sglang\nsglang_reshard\n"
    assert all(name.startswith(("sglang/", "sglang_reshard/", f"{about}/")) for name in held)


def test_metadata_is_stocks_with_ours_added_but_for_sglang() -> None:
    made = metadata.merged(
        STOCK_METADATA, PLUGIN_METADATA, "0.5.12+reshard.1", ["kernels<0.15"], "sglang_reshard/LICENSE"
    )
    head, _, description = STOCK_METADATA.partition("\n\n")
    added = [
        "License-File: sglang_reshard/LICENSE",
        "Provides-Dist: sglang-reshard (0.1.0)",
        "Provides-Extra: engine",
        "Provides-Extra: all",
        "Requires-Dist: torch>=2.9",
        'Requires-Dist: sglang[engine,ray]; extra == "all"',
        "Requires-Dist: kernels<0.15",
    ]
    head = head.replace("\nVersion: 0.5.12", "\nVersion: 0.5.12+reshard.1")
    assert made == "\n".join([head, *added]) + "\n\n" + description


def test_the_doctor_knows_a_fork_for_an_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive.write(fork.fork(stock_wheel(), plugin_wheel(), 3), tmp_path)
    with zipfile.ZipFile(path) as file:
        file.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert provided_by_sglang() == "0.1.0"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("sglang==0.5.12", "sglang==0.5.13", "asks for sglang==0.5.13"),
        ("Requires-Python: >=3.10", "Requires-Python: >=3.12", "for Python >=3.10, sglang-reshard for >=3.12"),
    ],
)
def test_wheels_that_do_not_go_together_are_refused(old: str, new: str, says: str) -> None:
    with pytest.raises(CannotMerge, match=says):
        fork.fork(stock_wheel(), plugin_wheel(PLUGIN_METADATA.replace(old, new)), 1)


def test_a_script_of_both_wheels_is_refused_unless_it_is_the_same() -> None:
    same = "[console_scripts]\nsglang = sglang.cli:main\nOurs = ours:main\n"
    made = metadata.merged_entry_points(same, same)
    assert made == same
    other = same.replace("sglang.cli", "sglang_reshard.cli.main")
    with pytest.raises(CannotMerge, match=r"entry point sglang of \[console_scripts\]"):
        fork.fork(stock_wheel(), plugin_wheel(entry_points=other), 1)


def test_a_version_module_of_another_form_is_refused() -> None:
    with pytest.raises(CannotMerge, match=r"0 places in sglang's _version\.py"):
        metadata.with_version("__version__ = '0.5.13'", "0.5.12", "0.5.12+reshard.1", "changed")


# -- what the lock says


def test_only_the_wheel_with_the_known_digest_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"wheel")
    digest = hashlib.sha256(b"wheel").hexdigest()
    stock.check(tmp_path / "a.whl", f"{digest}  a.whl\n")
    with pytest.raises(stock.WrongDigest, match=r"sha256\.txt says 00"):
        stock.check(tmp_path / "a.whl", "00  a.whl\n")
    with pytest.raises(stock.WrongDigest, match=rf"does not know a\.whl.*{digest}  a\.whl"):
        stock.check(tmp_path / "a.whl", "00  b.whl\n")


def test_every_known_digest_is_of_the_version_in_the_lock() -> None:
    version = stock.pinned_version((REPOSITORY / "requirements.lock").read_text())
    lines = [line.split() for line in stock.DIGESTS.read_text().splitlines()]
    assert len(lines) > 1
    assert all(len(digest) == 64 and name.startswith(f"sglang-{version}-") for digest, name in lines)


def test_an_environment_has_the_fork_where_the_lock_has_sglang(tmp_path: Path) -> None:
    forked = tmp_path / "sglang-0.5.12+reshard.1-x.whl"
    lock = "a==1\nsglang==0.5.12\n    # via -r requirements.in\nsglang-kernel==0.4\n"
    made = environment.requirements(lock, forked).splitlines()
    assert made[1] == f"sglang @ {forked.as_uri()}"
    assert [made[0], *made[2:]] == ["a==1", "    # via -r requirements.in", "sglang-kernel==0.4"]
    with pytest.raises(ValueError, match="0 lines sglang==VERSION"):
        environment.requirements("a==1", forked)


# -- the plugin's wheel


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain.build(tmp_path_factory.mktemp("built"))


def test_the_plugins_wheel_is_the_same_bytes_again(built: Path, tmp_path: Path) -> None:
    assert plain.build(tmp_path).read_bytes() == built.read_bytes()


def test_the_plugins_wheel_holds_every_file_of_the_package(built: Path) -> None:
    held = {entry.path for entry in archive.read(built).entries if "dist-info" not in entry.path}
    folders = {"python/sglang_reshard": "", "patches": "patches/", "verl_integration": "verl/"}
    files = {
        f"sglang_reshard/{within}{path.relative_to(REPOSITORY / folder).as_posix()}"
        for folder, within in folders.items()
        for path in (REPOSITORY / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == files


def test_the_plugins_wheel_says_what_it_is(built: Path) -> None:
    ours = archive.read(built)
    assert ours.filename == f"sglang_reshard-{__version__}-py3-none-any.whl"
    assert tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"] == __version__
    assert ours.about("licenses/LICENSE") == (REPOSITORY / "LICENSE").read_bytes()
    assert "[sglang.srt.plugins]\nreshard = sglang_reshard.patches:install\n" in ours.about("entry_points.txt").decode()


def test_a_wheel_is_built_without_the_projects_environment() -> None:
    asked = subprocess.run(["make", "-n", "-B", "wheel"], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert asked.returncode == 0, asked.stderr
    assert "tools.release.plain" in asked.stdout
    assert "requirements.lock" not in asked.stdout
    assert ".venv/" not in asked.stdout

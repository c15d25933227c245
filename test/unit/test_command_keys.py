"""Every command that takes a key takes it from a file and from the environment, which other users cannot read."""

import pytest
from typer.testing import CliRunner

from sglang_reshard.cli import doctor, follow, pull
from sglang_reshard.cli.main import app

PULL = ["pull", "--from", "http://a:1", "--to", "http://b:1"]
FOLLOW = ["follow", "folder", "--to", "http://b:1", "--once"]
DOCTOR = ["doctor", "--url", "http://b:1"]


@pytest.fixture
def found(monkeypatch):
    """What the commands were given: (api key, admin key) of each server, the target's last."""
    seen = []
    pairs = lambda *servers: seen.extend((server.api_key, server.admin_api_key) for server in servers)  # noqa: E731
    monkeypatch.setattr(pull, "run", lambda source, target, *_: pairs(source, target))
    monkeypatch.setattr(follow, "run", lambda _folder, _url, _cache, keys, *_, **__: seen.append(keys) or 0)
    monkeypatch.setattr(doctor, "examine", lambda _url, *given: seen.append(given[:2]) or [])
    return seen


@pytest.fixture
def files(tmp_path):
    for name in ("api", "admin", "from-api", "from-admin"):
        (tmp_path / name).write_text(f"{name} of a file\nanother line\n")
    return tmp_path


def run(*arguments, **environment):
    given = {f"SGLANG_RESHARD_{name}": value for name, value in environment.items()}
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=given)


@pytest.mark.parametrize("command", [PULL, FOLLOW, DOCTOR], ids=lambda command: command[0])
def test_keys_of_files_and_of_the_environment(found, files, command):
    options = ("--api-key-file", files / "api", "--admin-api-key-file", files / "admin")
    assert run(*command, *options).exit_code == 0
    assert found[-1] == ("api of a file", "admin of a file")
    assert run(*command, API_KEY="a", ADMIN_API_KEY="b").exit_code == 0
    assert found[-1] == ("a", "b")
    named = {"API_KEY_FILE": str(files / "api"), "ADMIN_API_KEY_FILE": str(files / "admin")}
    assert run(*command, **named, API_KEY="a").exit_code == 0
    assert found[-1] == ("api of a file", "admin of a file"), "a file is chosen on purpose"


def test_keys_of_the_server_that_is_pulled_from(found, files):
    options = ("--from-api-key-file", files / "from-api", "--from-admin-api-key-file", files / "from-admin")
    assert run(*PULL, *options, ADMIN_API_KEY="b").exit_code == 0
    assert found[-2:] == [("from-api of a file", "from-admin of a file"), ("", "b")]
    assert run(*PULL, FROM_API_KEY="c", FROM_ADMIN_API_KEY="d").exit_code == 0
    assert found[-2:] == [("c", "d"), ("", "")]
    assert run(*PULL, API_KEY="a", ADMIN_API_KEY="b").exit_code == 0
    assert found[-2:] == [("a", "b")] * 2, "of both, unless the first has others"


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe"])
def test_a_file_without_a_key_ends_the_command(found, tmp_path, content):
    (tmp_path / "key").write_bytes(content)
    assert run(*DOCTOR, "--admin-api-key-file", tmp_path / "key").exit_code == 2
    assert found == []

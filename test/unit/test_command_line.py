"""Wrong input of every option of every command: one line on stderr, the exit code of the table, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner, Result

from sglang_reshard.cli import versions
from sglang_reshard.cli.main import app
from sglang_reshard.cli.outcome import EXIT_CODES, IMPOSSIBLE, INTERRUPTED, REFUSED, line_of
from sglang_reshard.cli.plan import command
from sglang_reshard.cli.plan.worker_process import ChildFailed
from sglang_reshard.cli.values import TRANSPORTS, VERIFY
from sglang_reshard.errors import EngineRefused, Mismatch
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.protocol.messages import Verify
from sglang_reshard.protocol.weights_info import WeightsInfo
from sglang_reshard.version import PROTOCOL, __version__
from support.documents import table
from support.snapshot_writer import write

NOWHERE = "http://127.0.0.1:1"
# Command lines that are right, up to what is not there.
RIGHT = {
    "selftest": [],
    "doctor": [],
    "pull": ["--from", NOWHERE, "--to", NOWHERE],
    "follow": [".", "--to", NOWHERE, "--once"],
    "plan": ["qwen3-8b", "--source", "tp=4", "--target", "tp=8"],
    "report": ["-", "--out", "/dev/null"],
}
UPDATE = UpdateReport.failed("", None).json()  # what `report` reads from standard input
KEYS = [(f"--{prefix}{kind}", value, "HTTP header") for prefix in ("", "admin-") for kind, value in (("api-key", "ü"),)]
KEY_FILES = [(f"--{prefix}api-key-file", "/no/such/file", "cannot be read") for prefix in ("", "admin-")]
FROM_KEYS = [(option.replace("--", "--from-"), *rest) for option, *rest in (*KEYS, *KEY_FILES)]
# (option or argument, a wrong value, words of the line); of a flag the value is None.
WRONG: dict[str, list[tuple[str, str | None, str]]] = {
    "selftest": [
        ("--source", "fsdp", "NAME=SIZE"),
        ("--source", "tp=x", "NAME=SIZE"),
        ("--source", "fdsp=2", "Did you mean 'fsdp'?"),
        ("--target", "tp=0", "positive"),
        ("--target", "tp=4,ep=3", "tp=4 is not divisible by ep=3"),
        ("--model", "no/such/folder", "no/such/folder"),
        ("--routes", "foo", "auto, ipc, p2p, broadcast, nixl"),
        ("--routes", "auto,boardcast", "Did you mean 'broadcast'?"),
        ("--routes", "", "''"),
        ("--minutes", "0", "--minutes"),
        ("--minutes", "inf", "Invalid value"),
    ],
    "doctor": [*KEYS, *KEY_FILES, ("--side", "trainr", "Did you mean 'trainer'?")],
    "pull": [
        *KEYS,
        *KEY_FILES,
        *FROM_KEYS,
        ("--from", "gpu7:30000", "http://host:port"),
        ("--from", "", "http://host:port"),
        ("--to", "ftp://gpu7:30000", "http://host:port"),
        ("--to", "http://gpu7:99999", "http://host:port"),
        ("--to", "http://gpu7:port", "http://host:port"),
        ("--transport", "p2q", "Did you mean 'p2p'?"),
        ("--verify", "ful", "Did you mean 'full'?"),
        ("--timeout-s", "0", "--timeout-s"),
        ("--timeout-s", "nan", "Invalid value"),
    ],
    "follow": [
        *KEYS,
        *KEY_FILES,
        ("FOLDER", "/no/such/folder", "/no/such/folder does not exist"),
        ("FOLDER", "s3://bucket/run", "cannot be read"),
        ("FOLDER", "s4://bucket/run", "Did you mean 's3'?"),
        ("--to", "gpu7", "http://host:port"),
        ("--cache", __file__, "test_command_line.py"),
        ("--interval-s", "0", "--interval-s"),
        ("--interval-s", "1e300", "--interval-s"),
        ("--interval-s", "nan", "Invalid value"),
    ],
    "plan": [
        ("MODEL", "qwen3-8", "Did you mean 'qwen3-8b'?"),
        ("MODEL", "/missing/Qwen3-8B", "/missing/Qwen3-8B is not a folder"),
        ("MODEL", "Qwen/Qwen3-8B", "Did you mean 'qwen3-8b'?"),
        ("MODEL", "", "is not a folder"),
        ("MODEL", __file__, "is not JSON"),
        ("MODEL", "/dev/null", "is not a folder"),
        ("--source", "tp=0", "--source"),
        ("--source", "pp=2", "fsdp=8,tp=8"),
        ("--source", "hsdp=99999x99999", "9,999,800,001 ranks"),
        ("--target", "fsdp=4", "--target"),
        ("--target", "tp=4,ep=3", "tp=4 is not divisible by ep=3"),
        ("--target", "tp=4,dp=3", "tp=4 is not divisible by dp=3"),
        ("--target", "tp=2,pp=37", "qwen3-8b has 36 layers"),
        ("--target", "tp=999999", "999,999 ranks"),
        ("--layers", "-1", "--layers"),
        ("--layers", "37", "the model has 36"),
        ("--transport", "pigeon", "auto, ipc, p2p, broadcast, nixl"),
        ("--bucket-mib", "nan", "Invalid value"),
        ("--nvlink", "-1", "--nvlink"),
        ("--nvlink", "inf", "Invalid value"),
        ("--nic", "fast", "--nic"),
        ("--ranks-per-host", "0", "--ranks-per-host"),
        ("--device", "gpu", "cuda, cpu"),
        ("--plot", "a.xyz", "png"),
        ("--plot", "a.pgn", "Did you mean 'png'?"),
        ("--plot", "a", "png"),
        ("--plot", "/no/such/folder/a.png", "the folder /no/such/folder does not exist"),
        ("--processes", "0", "--processes"),
        ("--deadline-s", "nan", "Invalid value"),
    ],
    "report": [
        ("FILE", "/no/such/file", "sglang-reshard report: /no/such/file: No such file or directory"),
        ("FILE", "/dev", "sglang-reshard report: /dev: Is a directory"),
        ("--update", "-1", "--update"),
        ("--update", "2", "has 1 reports, not 2"),
        ("--out", "/no/such/folder/page.html", "No such file or directory"),
        ("--trace", "/no/such/folder/trace.json", "No such file or directory"),
    ],
}
TAKES_ANYTHING = {"--ignore", "--url", "--help"}  # doctor reports a wrong URL as a finding, with exit code 1


def commands() -> Iterator[tuple[str, Any]]:
    yield from typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]


def is_flag(parameter: Any) -> bool:
    return bool(getattr(parameter, "is_flag", False))


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, list(arguments), input=UPDATE, env=environment)


def told(result: Result, code: int) -> str:
    """Returns the line of a command that has failed."""
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    (line,) = result.stderr.splitlines()
    return line


def changed(name: str, option: str, value: str) -> list[str]:
    """The right command line with this value in place of its own."""
    right = list(RIGHT[name])
    if not option.startswith("-"):
        return [value, *right[1:]]
    if option in right:
        right[right.index(option) + 1] = value
        return right
    return [*right, option, value]


@pytest.mark.parametrize(
    ("name", "option", "value", "words"), [(name, *wrong) for name, table in WRONG.items() for wrong in table]
)
def test_a_wrong_value_is_one_line(name: str, option: str, value: str, words: str) -> None:
    if option == "--plot":
        pytest.importorskip("matplotlib")
    assert words in told(run(name, *changed(name, option, value)), IMPOSSIBLE)


@pytest.mark.parametrize("name", RIGHT)
def test_the_table_has_every_option_of_every_command(name: str) -> None:
    there = dict(commands())
    assert there.keys() == RIGHT.keys()
    taken = {parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.opts[0].upper()
             for parameter in there[name].params if not is_flag(parameter)}  # fmt: skip
    assert taken - TAKES_ANYTHING == {option for option, *_ in WRONG[name]}


@pytest.mark.parametrize("name", RIGHT)
def test_flags_options_and_arguments_that_are_wrong(name: str) -> None:
    for option in (flag for _, of in commands() for flag in of.params if is_flag(flag)):
        if option in dict(commands())[name].params and option.name != "help":
            assert "value" in told(run(name, *RIGHT[name], f"{option.opts[0]}=maybe"), IMPOSSIBLE)
    assert "--no-such-option" in told(run(name, *RIGHT[name], "--no-such-option"), IMPOSSIBLE)
    assert "unexpected extra argument" in told(run(name, *RIGHT[name], "more"), IMPOSSIBLE)


@pytest.mark.parametrize(
    ("name", "left_out"), [("pull", "--from"), ("pull", "--to"), ("follow", "--to"), ("plan", "--source")]
)
def test_an_option_that_is_missing_is_named(name: str, left_out: str) -> None:
    at = RIGHT[name].index(left_out)
    assert f"Missing option '{left_out}'" in told(run(name, *RIGHT[name][:at], *RIGHT[name][at + 2 :]), IMPOSSIBLE)


def test_a_misspelt_command_names_the_nearest() -> None:
    assert "Did you mean 'plan'?" in told(run("plann"), IMPOSSIBLE)


@pytest.mark.parametrize("name", ["pull", "follow"])
def test_a_server_that_does_not_answer_is_a_refusal(name: str, tmp_path: Path) -> None:
    right = RIGHT[name] if name == "pull" else [str(tmp_path), *RIGHT[name][1:]]
    assert f"sglang-reshard {name}: {NOWHERE} did not answer" in told(run(name, *right), REFUSED)


def test_a_plan_without_sglang_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    assert "pip install 'sglang-reshard[engine]'" in told(run("plan", *RIGHT["plan"]), IMPOSSIBLE)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineRefused("no"), REFUSED),
        (Mismatch("no"), IMPOSSIBLE),
        (ValueError("no"), IMPOSSIBLE),
        (OSError("no"), IMPOSSIBLE),
        (ImportError("no"), IMPOSSIBLE),
    ],
)
def test_errors_of_a_command_are_a_line_without_python_names(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise error

    monkeypatch.setattr(command, "run", fail)
    assert told(run("plan", *RIGHT["plan"]), code) == "sglang-reshard plan: no"


def test_ctrl_c_has_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupt)
    assert run("plan", *RIGHT["plan"]).exit_code == INTERRUPTED


def test_the_traceback_of_another_process_is_kept_in_a_file() -> None:
    line = line_of(ChildFailed("The plan of m failed:\nTraceback ...\n  File x\nKeyError: 'q'\n"))
    assert line.startswith("The plan of m failed: KeyError: 'q' (all of it is in ")
    kept = Path(line.rpartition(" ")[2].removesuffix(")"))
    assert "Traceback ..." in kept.read_text()
    kept.unlink()


def test_follow_once_says_that_there_is_nothing_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_reshard.api.remote_engine.RemoteEngine.check", lambda _: None)
    ended = run("follow", str(tmp_path), *RIGHT["follow"][1:])
    assert (ended.exit_code, ended.stdout) == (0, f"the folder {tmp_path} has no snapshot yet\n")
    info = WeightsInfo(version="another", package_version="", publication=2**62)
    monkeypatch.setattr("sglang_reshard.api.remote_engine.RemoteEngine.weights_info", lambda _: info)
    write(tmp_path, 1)
    ended = run("follow", str(tmp_path), *RIGHT["follow"][1:])
    said = f"{NOWHERE}: nothing to load, the folder {tmp_path} has no snapshot after the server's weights\n"
    assert (ended.exit_code, ended.stdout) == (0, said)


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    shown = run("--version")
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[:2] == [f"sglang-reshard {__version__}", f"protocol {PROTOCOL}"]
    assert f"torch {torch.__version__.partition('+')[0]}" in shown.stdout

    def missing(name: str) -> str:
        raise versions.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions.importlib.metadata, "version", missing)
    assert "sglang is not installed" in run("--version").stdout


def test_the_help_has_the_exit_codes_and_all_transports() -> None:
    shown = " ".join(run("--help").stdout.split())
    for code, meaning in EXIT_CODES.items():
        assert f"{code} {meaning}" in shown
    assert "..." not in shown.partition("Commands: ")[2], "no command's sentence is cut"
    assert get_args(Verify) == VERIFY
    assert TRANSPORTS[0] == "auto"


@pytest.mark.parametrize("name", RIGHT)
def test_the_help_has_whole_names_and_choices_at_80_columns(name: str) -> None:
    words = run(name, "--help", COLUMNS="80").stdout.split()
    for parameter in dict(commands())[name].params:
        assert {*parameter.opts, parameter.metavar, f"{parameter.envvar}]"} - {None, "None]"} <= set(words), parameter
    assert "<bool>" not in words


def test_the_module_is_the_command_and_the_shell_completes_it() -> None:
    command = [sys.executable, "-m", "sglang_reshard"]
    versions = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    assert versions == run("--version").stdout
    asked = {**os.environ, "_SGLANG_RESHARD_COMPLETE": "complete_bash", "COMP_CWORD": "3"}
    asked["COMP_WORDS"] = "sglang-reshard pull --verify sa"
    told = subprocess.run(command, env=asked, capture_output=True, text=True, check=False).stdout
    assert told.split() == ["sample"]


PAGE = "docs/usage/command-line.md"


def test_the_page_has_the_exit_codes() -> None:
    assert [row[0] for row in table(PAGE, "## Exit codes")] == [f"`{code}`" for code in EXIT_CODES]
    assert [row[1] for row in table(PAGE, "## Exit codes")] == list(EXIT_CODES.values())


@pytest.mark.parametrize("name", RIGHT)
def test_the_page_has_every_option_with_type_default_and_help(name: str) -> None:
    there = rows(dict(commands())[name])
    assert table(PAGE, f"## `sglang-reshard {name}`") == there, "\n".join(f"| {' | '.join(row)} |" for row in there)


def rows(command: Any) -> list[list[str]]:
    """The rows of the table of a command's arguments and options: name, type, default, help."""
    hints = get_type_hints(command.callback)
    return [
        [
            f"`{shown_name(p)}`",
            shown_choices(p) or shown_type(hints[p.name]),
            shown_default(p),
            f"{p.help}{shown_variable(p)}",
        ]
        for p in command.params
        if p.name != "help"
    ]


def shown_name(parameter: Any) -> str:
    return parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.opts[0].upper()


def shown_choices(parameter: Any) -> str:
    return (parameter.metavar or "").strip("[]").replace("|", ", ") if parameter.opts[0].startswith("-") else ""


def shown_type(hint: Any) -> str:
    (kind,) = {*(get_args(hint) or [hint])} - {type(None)}
    if get_args(kind):
        return f"{shown_type(get_args(kind)[0])}, repeatable"
    return {bool: "flag", str: "text", Path: "path"}.get(kind, kind.__name__)


def shown_default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if is_flag(parameter) or parameter.default in (None, "", ()):
        return ""
    return f"`{parameter.default}`".replace(".0`", "`")


def shown_variable(parameter: Any) -> str:
    return f" Environment: `{parameter.envvar}`." if parameter.envvar else ""

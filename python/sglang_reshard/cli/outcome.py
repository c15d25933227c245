"""Ends every command with an exit code, and a failed one with one line on stderr. All errors end here."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import typer
from typer.core import TyperGroup

from sglang_reshard.errors import EngineRefused, ReshardError, TornWeights, Unauthorized, WeightsMissing

DONE, REFUSED, IMPOSSIBLE, INTERRUPTED = 0, 1, 2, 130
EXIT_CODES = {
    DONE: "The command did what it was asked to do.",
    REFUSED: (
        "plan: the update would be refused. pull, follow: the server refused, did not answer or did not get the "
        "weights. selftest: something was wrong. doctor: a check failed."
    ),
    IMPOSSIBLE: "The command cannot run as written: an option, a model, a file or a package is wrong or missing.",
    INTERRUPTED: "Interrupted with Ctrl-C.",
}

_UsageError: type[Exception] = typer.BadParameter.mro()[1]  # typer has its own click since 0.26
_REFUSALS = (EngineRefused, TornWeights, Unauthorized, WeightsMissing)


class Commands(TyperGroup):
    """Ends every command with one of `EXIT_CODES`; an error is one line on stderr, without a traceback."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        inherited: Any = super().main
        try:
            code = inherited(*args, standalone_mode=False, **extra)
        except _UsageError as error:
            code = _show_usage(error)
        except (typer.Abort, KeyboardInterrupt):
            code = INTERRUPTED
        if not standalone_mode:
            return code
        sys.exit(code or DONE)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ReshardError, ValueError, OSError, ImportError) as error:
            typer.echo(f"{ctx.command_path} {ctx.invoked_subcommand}: {line_of(error)}", err=True)
            raise typer.Exit(REFUSED if isinstance(error, _REFUSALS) else IMPOSSIBLE) from error


def line_of(error: BaseException) -> str:
    """Returns the error as one line. It names a file with the full text if that has more lines, as a traceback has."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) < 2:
        return "".join(lines) or type(error).__name__
    with tempfile.NamedTemporaryFile("w", prefix="sglang-reshard-", suffix=".log", delete=False) as log:
        log.write(f"{error}\n")
    return f"{lines[0]} {lines[-1]} (all of it is in {log.name})"


def _show_usage(error: Any) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":  # rich has printed the help
        typer.echo(error.format_message(), nl=bool(error.format_message()))
        return IMPOSSIBLE
    where = error.ctx.command_path if error.ctx is not None else "sglang-reshard"
    line = " ".join(error.format_message().split())
    typer.echo(f"{where}: {line} (see {where} --help)", err=True)
    return IMPOSSIBLE

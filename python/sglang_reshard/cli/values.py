"""Checks the values of options while the command line is parsed: before a network, a model or a process is touched."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import typer

from sglang_reshard.errors import Unsupported
from sglang_reshard.nearest import not_one_of
from sglang_reshard.route_table import ROUTES

TRANSPORTS = ("auto", *ROUTES)
VERIFY = ("off", "sample", "full")


def one_of(known: Sequence[str]) -> Callable[[str], str]:
    """Returns the check of an option that takes one of these values."""

    def check(value: str) -> str:
        if value not in known:
            raise typer.BadParameter(not_one_of(repr(value), value, known))
        return value

    return check


def choice(known: Sequence[str], help: str) -> Any:
    """Returns an option that takes one of these values: its help and the shell's completion list them."""
    return typer.Option(
        metavar=f"[{'|'.join(known)}]", callback=one_of(known), autocompletion=lambda: list(known), help=help
    )


def several_of(known: Sequence[str]) -> Callable[[str], str]:
    """Returns the check of an option that takes a list of these values, with commas between them."""
    check_one = one_of(known)

    def check(value: str) -> str:
        return ",".join(check_one(part.strip()) for part in value.split(","))

    return check


def finite(value: float) -> float:
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def server_url(value: str) -> str:
    """Returns the URL of a server. It checks the form of the URL and does not connect."""
    from sglang_reshard.protocol.server_client import check_url

    try:
        return check_url(value)
    except Unsupported as error:
        raise typer.BadParameter(str(error)) from error

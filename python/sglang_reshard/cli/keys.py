"""Keys of servers, as the commands take them: every user of a host can read the command lines of all its processes.

A key comes from a file, from the environment, or from the command line, in this order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_API, _ADMIN = "SGLANG_RESHARD_API_KEY", "SGLANG_RESHARD_ADMIN_API_KEY"
_FROM_API, _FROM_ADMIN = "SGLANG_RESHARD_FROM_API_KEY", "SGLANG_RESHARD_FROM_ADMIN_API_KEY"
_VISIBLE = "Every user of this host can read command lines: prefer the file or the environment."
_FIRST = "The first line counts."

ApiKey = Annotated[str | None, typer.Option(envvar=_API, help=f"The server's --api-key. {_VISIBLE}")]
ApiKeyFile = Annotated[Path | None, typer.Option(envvar=f"{_API}_FILE", help=f"File with the API key. {_FIRST}")]
AdminApiKey = Annotated[str | None, typer.Option(envvar=_ADMIN, help=f"The server's --admin-api-key. {_VISIBLE}")]
AdminApiKeyFile = Annotated[
    Path | None, typer.Option(envvar=f"{_ADMIN}_FILE", help=f"File with the admin API key. {_FIRST}")
]
FromApiKey = Annotated[str | None, typer.Option(envvar=_FROM_API, help="The API key of --from, if it has another.")]
FromApiKeyFile = Annotated[
    Path | None, typer.Option(envvar=f"{_FROM_API}_FILE", help=f"File with the API key of --from. {_FIRST}")
]
FromAdminApiKey = Annotated[
    str | None, typer.Option(envvar=_FROM_ADMIN, help="The admin API key of --from, if it has another.")
]
FromAdminApiKeyFile = Annotated[
    Path | None, typer.Option(envvar=f"{_FROM_ADMIN}_FILE", help=f"File with the admin API key of --from. {_FIRST}")
]


def key(given: str | None, file: Path | None) -> str | None:
    """Returns the key: the first line of the file, if there is one. Ends the command if it cannot be read."""
    if file is None:
        return None if given is None else _checked(given)
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"the key's file cannot be read: {error}") from error
    if not lines or not lines[0].strip():
        raise typer.BadParameter(f"{file} contains no key; write the key into its first line")
    return _checked(lines[0].strip())


def _checked(key: str) -> str:
    if not (key.isascii() and key.isprintable()):
        raise typer.BadParameter("a key has characters that an HTTP header cannot carry")
    return key

"""Log lines that say which update they are of.

    logger = get_logger(__name__)
    with about(session="ab12", update=7, version="42", rank="engine rank 3"):
        logger.warning("slow")          # the record has session, update, version and rank as attributes

`SGLANG_RESHARD_LOG=json` in the environment, on either side, writes this package's lines to standard error as JSON, a
line each, and to nobody else. Without it they go where the application's, or SGLang's, other lines go.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

FIELDS = ("session", "update", "version", "rank")
VARIABLE = "SGLANG_RESHARD_LOG"
_PACKAGE = "sglang_reshard"

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_about: ContextVar[Mapping[str, Any]] = ContextVar("sglang_reshard_about", default=_NOTHING)


@contextmanager
def about(**fields: Any) -> Iterator[None]:
    """Records of the block's lines, in this thread or task, have these attributes too; they are of `FIELDS`."""
    before = _about.set({**_about.get(), **fields})
    try:
        yield
    finally:
        _about.reset(before)


class _Logger(logging.LoggerAdapter):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**dict.fromkeys(FIELDS, ""), **_about.get(), **(kwargs.get("extra") or {})}
        return msg, kwargs


def get_logger(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """The logger `name`, whose records have all of `FIELDS`: those of the update under way, or empty."""
    return _Logger(logging.getLogger(name), {})


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, what is known of `FIELDS`, exception."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update((field, value) for field in FIELDS if (value := getattr(record, field, "")) not in ("", None))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def wanted_format() -> str:
    """What the environment's SGLANG_RESHARD_LOG says: "json" or "". Raises ValueError for another format."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "json"):
        raise ValueError(f"{VARIABLE}={wanted!r}: 'json' is the only format beside the application's own")
    return wanted


def configure() -> None:
    """Do as `wanted_format` says, and raise what it raises."""
    wanted = wanted_format()
    own = logging.getLogger(_PACKAGE)
    if wanted and not any(isinstance(handler.formatter, JsonFormatter) for handler in own.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
        own.addHandler(handler)
        own.propagate = False
        own.setLevel(logging.INFO)

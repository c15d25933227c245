"""Adds the session, update, version and rank to the log records of an update.

    logger = get_logger(__name__)
    with log_context(session="ab12", update=7, version="42", rank="engine rank 3"):
        logger.warning("slow")          # the record has session, update, version and rank as attributes

With `SGLANG_RESHARD_LOG=json` in the environment, on either side, this package's records are written to standard error
only, one JSON object per line. Without it they are handled by the application's, or SGLang's, own handlers.
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

_EMPTY: Mapping[str, Any] = MappingProxyType({})
_context: ContextVar[Mapping[str, Any]] = ContextVar("sglang_reshard_log_context", default=_EMPTY)


@contextmanager
def log_context(**fields: Any) -> Iterator[None]:
    """Adds attributes, out of `FIELDS`, to the records logged inside the block by this thread or task."""
    token = _context.set({**_context.get(), **fields})
    try:
        yield
    finally:
        _context.reset(token)


class _Logger(logging.LoggerAdapter):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**dict.fromkeys(FIELDS, ""), **_context.get(), **(kwargs.get("extra") or {})}
        return msg, kwargs


def get_logger(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """Returns the logger `name`, whose records have all of `FIELDS`; empty outside of an update."""
    return _Logger(logging.getLogger(name), {})


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time (UTC), level, logger, message, non-empty `FIELDS`, exception."""

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


def log_format() -> str:
    """Returns the format that SGLANG_RESHARD_LOG selects: "json" or "". Raises ValueError for any other."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "json"):
        raise ValueError(f"{VARIABLE}={value!r} is not supported; set it to 'json', or unset it")
    return value


def configure() -> None:
    """Applies `log_format`. Raises as it does."""
    json_format = log_format()
    package_logger = logging.getLogger(_PACKAGE)
    if json_format and not any(isinstance(handler.formatter, JsonFormatter) for handler in package_logger.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
        package_logger.addHandler(handler)
        package_logger.propagate = False
        package_logger.setLevel(logging.INFO)

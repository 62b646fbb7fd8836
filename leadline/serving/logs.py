"""Log lines, for people or for machines; no text of a request unless asked for (serving-api 14)."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from leadline.config.server import TelemetryConfig


@dataclass(frozen=True, slots=True)
class Event:
    """A log message with values: ``logger.info(Event("finished", {"reason": "stop"}))``."""

    name: str
    fields: dict[str, Any]

    def __str__(self) -> str:
        values = (f"{name}={_plain(value)}" for name, value in self.fields.items())
        return " ".join((self.name, *values))


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return text if text.isprintable() and " " not in text else repr(text)  # one event, one line


class JsonFormatter(logging.Formatter):
    """One JSON object a line; the values of an ``Event`` are keys of their own."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if isinstance(record.msg, Event):
            line |= {"message": record.msg.name, **record.msg.fields}
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure_logging(config: TelemetryConfig) -> None:
    """Write this process's log to standard error, by ``--log-level`` and ``--log-format``."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter()
        if config.log_format == "json"
        else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)

"""Log lines on standard error: an event's constant text and its fields, for people or as JSON."""

import datetime as dt
import json
import logging
import sys

# What every record has; the rest are the fields of the event, given with `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def log_to_stderr(*, level: str, form: str) -> None:
    """Sends every logger to standard error.

    Args:
        level: Name of the least level that is written.
        form: "text" or "json".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_is_news)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _is_news(record: logging.LogRecord) -> bool:
    """Not what gRPC says of a message that is no protobuf: whoever may connect could fill the log
    with tracebacks, and the caller was told."""
    kind = record.exc_info[0] if record.exc_info else None
    return not (record.name.startswith("grpc") and kind and kind.__name__ == "DecodeError")


class TextLines(logging.Formatter):
    """`2026-01-02T03:04:05.678Z INFO event key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback follows on lines of its own."""
        fields = "".join(f" {name}={_word(value)}" for name, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The fields of the event beside time, level, logger and event."""
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    moment = dt.datetime.fromtimestamp(record.created, tz=dt.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _word(value: object) -> str:
    """A field's value; in quotes and escaped unless it is one plain word."""
    text = str(value)
    return (
        text
        if text.isprintable() and text and " " not in text and '"' not in text
        else json.dumps(text)
    )

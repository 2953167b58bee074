"""Log lines as JSON objects, one a line, for programs that collect them."""

import json
import logging
import time


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time in UTC, level, logger, message, own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        made = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            made["message"] = str(record.msg).split(" ", 1)[0]
            made |= fields
        if record.exc_info:
            made["trace"] = self.formatException(record.exc_info)
        return json.dumps(made)

"""Logs of every process: structlog to standard error, JSON unless that is a terminal.

What is bound with `structlog.contextvars.bind_contextvars` (request and step ids) is in each line.
"""

import logging
import os
import sys

import structlog

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
LEVEL_VARIABLE = "MOE_LENS_LOG_LEVEL"


def log_level(text: str | None = None) -> int:
    """The numeric level of a name, by default MOE_LENS_LOG_LEVEL's; ValueError when unknown."""
    name = (text or os.environ.get(LEVEL_VARIABLE) or "info").lower()
    if name not in LEVELS:
        raise ValueError(f"{LEVEL_VARIABLE}={name!r}: expected one of {', '.join(LEVELS)}")
    return LEVELS[name]


def set_up_logs(process: str, level: str | None = None) -> None:
    """Configure logging for a process whose lines carry `process`."""
    terminal = sys.stderr.isatty()
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _with_process(process),
    ]
    render: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer()]
        if terminal
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(log_level(level)),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)


def _with_process(process: str) -> structlog.typing.Processor:
    def add(
        logger: structlog.typing.WrappedLogger, method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event["process"] = process
        return event

    return add

"""This project's own log lines, to standard error, which Ray keeps per process in its session's ``logs``."""

from __future__ import annotations

import logging


def log_to_stderr(level: int = logging.INFO) -> None:
    """Show the lines of loggers below ``scd``; those of libraries stay as they are. No line holds a prompt."""
    logger = logging.getLogger("scd")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level)

"""Lines of Celery's that help nobody who runs a worker are kept out of its log."""

import logging
import warnings

from celery.exceptions import CPendingDeprecationWarning

_LOGGERS = ("celery.worker.strategy", "celery.app.trace")  # two lines for every message


def silence_chatter() -> None:
    """Leave out Celery's lines on each message, and its plans for later versions at each loss of Redis."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=CPendingDeprecationWarning)

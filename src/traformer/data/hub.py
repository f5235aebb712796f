"""The Hugging Face hub without long retries: where it cannot be reached, what is on this machine is used."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlparse

_SECONDS = 4.0


def reachable() -> bool:
    """Whether a connection to the hub (or to HF_ENDPOINT, its mirror, or the proxy) can be opened."""
    address = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    place = urlparse(address or os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        with socket.create_connection((place.hostname or "huggingface.co", place.port or 443), timeout=_SECONDS):
            return True
    except OSError:
        return False


@contextmanager
def quiet_access() -> Iterator[bool]:
    """Silences the libraries' own messages; yields whether the hub is reachable, and sets them offline if it is not."""
    import huggingface_hub.constants as constants

    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "datasets", "transformers")]
    levels = [logger.level for logger in loggers]
    was_offline = constants.HF_HUB_OFFLINE
    online = not was_offline and reachable()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    constants.HF_HUB_OFFLINE = was_offline or not online
    try:
        yield online
    finally:
        constants.HF_HUB_OFFLINE = was_offline
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

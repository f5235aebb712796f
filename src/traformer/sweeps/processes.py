"""Child processes that do not outlive the sweep that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def die_with_parent() -> None:
    """Ask Linux to send this process SIGTERM (save and stop) when its parent is gone, however that ended."""
    if not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGTERM)
    if os.getppid() == 1:  # the parent went before the request was made
        os.kill(os.getpid(), signal.SIGTERM)

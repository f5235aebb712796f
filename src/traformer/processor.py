"""What the compiled kernel says about the processor. Imports no torch."""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

LIBRARY_VARIABLE = "TRAFORMER_CPU_LIBRARY"  # another build of the kernel, e.g. with sanitizers
ONEDNN_VARIABLE = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_BF16"  # the most that oneDNN may use where AMX is broken


def library_path() -> Path:
    """Where the build puts the kernel: inside the package, both in a checkout and in a wheel."""
    forced = os.environ.get(LIBRARY_VARIABLE)
    return Path(forced) if forced else Path(__file__).resolve().parent / "_native" / "libtraformer_cpu.so"


def amx_is_broken() -> bool:
    """Whether the processor announces AMX but has no tiles. Without the compiled kernel nobody can say: False.

    Call it after torch is imported: the kernel must bind to the OpenMP that torch brings along.
    """
    try:
        return bool(ctypes.CDLL(str(library_path())).tra_amx_is_broken())
    except (OSError, AttributeError):  # no kernel, or one of another version: the cpu backend says which
        return False


def avoid_broken_amx() -> None:
    """Keep oneDNN, torch's library for bfloat16 products on the CPU, from instructions that only seem to be there.

    Some virtual machines announce AMX without its tiles, and the first bfloat16 product ends the process with SIGILL.
    oneDNN reads the variable when it is first used, so this must come before that. A value that is set already stays.
    """
    if ONEDNN_VARIABLE in os.environ or not amx_is_broken():
        return
    os.environ[ONEDNN_VARIABLE] = WITHOUT_AMX
    logging.getLogger(__name__).debug(
        "this processor announces AMX but has no tiles: set %s=%s", ONEDNN_VARIABLE, WITHOUT_AMX
    )

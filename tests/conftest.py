"""Property tests draw the same problems on every machine.

Hypothesis mixes constants of whichever project files happen to be loaded into what it draws, and replays failures from
a cache; both are switched off here. Tensors are drawn with numpy (tests/ops/drawn.py), since torch's normal numbers
differ in the last bits between instruction sets. `make fuzz` is the campaign that draws anew each time.
"""

import os

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # before torch loads OpenMP: threads that wait leave the core to others

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

_nothing = providers.Constants()
providers._get_local_constants = lambda: _nothing

settings.register_profile(
    "same everywhere", derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("same everywhere")

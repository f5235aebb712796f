"""In place of a cell's program."""

import os
import signal

print("step 3 of 12", flush=True)
os.kill(os.getpid(), signal.SIGKILL)

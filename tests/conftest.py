"""Tests run beside one another, a process for each core: more threads in each would only get in each other's way."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; ranks and stages inherit it

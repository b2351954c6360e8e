"""The environment in which nbval runs the notebooks: the one they were committed from."""

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else torch says each out-of-memory error twice
os.environ.setdefault("SIMULATE_GPU", "1")  # exact figures, on a machine with a GPU too

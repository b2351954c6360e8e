"""Programs in a process of their own, for what an earlier test would have changed in this one."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent


def run_alone(code: str, **environment: str) -> str:
    """Run a program to its end; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", dedent(code)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

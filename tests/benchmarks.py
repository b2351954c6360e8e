"""What the extension costs, as ratios: ``python -m tests.benchmarks [cells|leaks|panel ...]``."""

import importlib
import sys

from tests.bench_cells import versions
from tests.bench_row import table

GROUPS = ("cells", "leaks", "panel")


def main(groups: list[str]) -> int:
    """Run the groups named, all by default; print a table of each and return 1 where a goal is missed."""
    unknown = sorted(set(groups) - set(GROUPS))
    if unknown:
        sys.stderr.write(f"no benchmark called {', '.join(unknown)}; there are {', '.join(GROUPS)}\n")
        return 2
    print(versions(), flush=True)
    missed = 0
    for group in groups or GROUPS:
        rows = list(importlib.import_module(f"tests.bench_{group}").rows())
        print(f"\n{group}\n{table(rows)}", flush=True)
        missed += sum(row.met is False for row in rows)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

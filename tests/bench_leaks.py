"""What a leak report costs: beside one garbage collection, beside a search that asks for referrers one by one."""

import gc
import importlib.util
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from jupyter_gpumem import simgpu
from tests.bench_row import Row, median_ratio, milliseconds

_ROUNDS = 5
_DICTS = 900_000
_CHAINS = 3  # tensors the search one by one is measured on; it is the same work for each of the others
_TENSORS = (10, 100, 1_000, 10_000, 100_000)
_OBJECTS = (200_000, 800_000, 3_200_000, 8_000_000)


def rows() -> Iterator[Row]:
    """Give the rows one by one; about three minutes in all."""
    if not simgpu.is_active():
        simgpu.activate("24GiB")
    gc.collect()
    yield _small_heap()
    # before the growth rows, whose largest heap would hide the memory of this one
    yield from _big_heap()
    yield from _growth()


def _small_heap() -> Row:
    tensors = _tensors(1_000)
    seconds = statistics.median(_timed(_report) for _ in range(_ROUNDS))
    objects = len(gc.get_objects())
    del tensors
    what = f"whole report, {objects:,} objects, 1,000 GPU tensors"
    return Row(what, milliseconds(seconds), goal="at most 0.3 s", met=seconds <= 0.3)


def _big_heap() -> Iterator[Row]:
    heap = [{"a": [i], "b": (i, [i])} for i in range(_DICTS)]
    nets = [{"w": _tensors(50)} for _ in range(200)]
    sys.modules["__main__"].gpumem_bench = nets  # type: ignore[attr-defined]  # what a user's variable would be
    gc.collect()
    before = _peak_bytes()
    reports, collections = [], []
    for _ in range(_ROUNDS):
        collections.append(_timed(gc.collect))
        reports.append(_timed(_report))
    ratio = median_ratio(reports, collections)
    report = statistics.median(reports)
    yield Row(
        f"whole report, {len(gc.get_objects()):,} objects, 10,000 tensors",
        milliseconds(report),
        f"gc.collect {milliseconds(statistics.median(collections))}",
        ratio,
        "at most 4",
        ratio <= 4,
    )
    extra = _peak_bytes() - before
    yield Row("  memory on top of that heap", f"{extra / 1e6:.0f} MB", goal="at most 500 MB", met=extra <= 500e6)
    chains = [_timed(_chain, tensor) for tensor in (net["w"][0] for net in nets[:_CHAINS])]
    by_one = statistics.median(chains) * 500
    yield Row(
        f"search by get_referrers, 500 tensors ({_CHAINS} measured)",
        milliseconds(by_one),
        f"whole report {milliseconds(report)}",
        by_one / report,
        "at least 20",
        by_one / report >= 20,
    )
    yield _memlab(report)
    del sys.modules["__main__"].gpumem_bench  # type: ignore[attr-defined]  # set above
    del heap, nets
    gc.collect()


def _memlab(report: float) -> Row:
    """Measure the one other tool that lists tensors; it names no holder."""
    what = "pytorch_memlab.MemReporter on that heap"
    if importlib.util.find_spec("pytorch_memlab") is None:
        return Row(what, "not installed")
    from pytorch_memlab.mem_reporter import MemReporter

    with redirect_stdout(StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seconds = _timed(MemReporter().report)
    return Row(what, milliseconds(seconds), f"whole report {milliseconds(report)}", seconds / report)


def _growth() -> Iterator[Row]:
    seconds = []
    for count in _TENSORS:
        tensors = _tensors(count)
        seconds.append(min(_timed(_report) for _ in range(2)))
        del tensors
    yield _growth_row("growth with tensors", _TENSORS, seconds)
    seconds = []
    for count in _OBJECTS:
        # a dict with two lists and a tuple with a list, as a user's records are
        heap = [{"a": [i], "b": (i, [i])} for i in range(count // 4)]
        gc.collect()
        seconds.append(min(_timed(_report) for _ in range(2)))
        del heap
    yield _growth_row("growth with gc objects", _OBJECTS, seconds)


def _growth_row(what: str, counts: Sequence[int], seconds: Sequence[float]) -> Row:
    exponent = _exponent(counts, seconds)
    ends = f"{counts[0]:,} to {counts[-1]:,}"
    told = f"{milliseconds(seconds[0])} to {milliseconds(seconds[-1])}"
    return Row(f"{what}, {ends}", told, f"exponent {exponent:.2f}", None, "at most 1.1", exponent <= 1.1)


def _exponent(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Fit seconds = c * count ** exponent by least squares of the logarithms."""
    xs, ys = [math.log(count) for count in counts], [math.log(second) for second in seconds]
    x_mean, y_mean = statistics.mean(xs), statistics.mean(ys)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return slope / sum((x - x_mean) ** 2 for x in xs)


def _tensors(count: int) -> list[Any]:
    import torch

    return [torch.empty(128, device="cuda") for _ in range(count)]


def _report() -> None:
    from jupyter_gpumem.leak_report import find_leaks

    assert find_leaks(budget_seconds=None).complete


def _chain(target: object) -> None:
    """Search as objgraph does: breadth first, one ``gc.get_referrers`` an object, up to a module's namespace."""
    namespaces = {id(vars(module)) for module in list(sys.modules.values()) if hasattr(module, "__dict__")}
    seen = {id(target)}
    level: list[Any] = [target]
    for _depth in range(20):
        following: list[Any] = []
        ignored = {id(level), id(following), id(seen)}
        for item in level:
            for referrer in gc.get_referrers(item):
                if id(referrer) in namespaces:
                    return
                if id(referrer) not in seen and id(referrer) not in ignored and type(referrer).__name__ != "frame":
                    seen.add(id(referrer))
                    following.append(referrer)
        level = following


def _timed(call: Callable[..., object], *arguments: object) -> float:
    started = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - started


def _peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

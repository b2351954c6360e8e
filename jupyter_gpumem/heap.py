"""One look at everything Python's collector tracks: the objects, their types, and who refers to a few of them."""

import gc
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

from jupyter_gpumem.references import References, addresses_of, hashes_of, members

_CHUNK = 256
# backward steps over all references before they are sorted once: sorting costs as much as so many steps
_LEVELS = 14
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # Py_TPFLAGS_HEAPTYPE, Py_TPFLAGS_IMMUTABLETYPE

_Found = TypeVar("_Found")

_type_flags: Callable[[type], int] = type.__dict__["__flags__"].__get__

type_namespace: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__
"""Read a class's own namespace without asking its metaclass."""

type_mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
"""Read a class's ancestors without asking its metaclass."""

module_namespace: Callable[[ModuleType], dict[str, Any]] = vars(ModuleType)["__dict__"].__get__
"""Read a module's namespace without asking the module."""


def is_made_by_class(kind: type) -> bool:
    """Tell whether a type was made by a ``class`` statement: it is neither builtin nor of a C extension."""
    flags = _type_flags(kind)
    return bool(flags & _HEAP_TYPE) and not flags & _IMMUTABLE_TYPE


def is_exactly(item: object, kinds: Iterable[type]) -> bool:
    """Tell whether the type of an object is one of some: ``in`` would ask a metaclass for equality."""
    kind = type(item)
    return any(kind is one for one in kinds)


class OutOfTimeError(Exception):
    """The time budget of a scan is spent."""


class Clock:
    """The time a scan may take, in seconds, and the call that shows how far it is."""

    def __init__(self, budget: float | None = None, progress: Callable[[str, float], None] | None = None) -> None:
        self._started = time.perf_counter()
        self._budget = budget
        self._progress = progress

    @property
    def seconds(self) -> float:
        """Seconds since the scan began."""
        return time.perf_counter() - self._started

    def check(self, stage: str) -> None:
        """Show progress past one second, and stop the scan once its time is spent.

        Raises
        ------
        OutOfTimeError
            When the budget is spent.
        """
        seconds = self.seconds
        if self._progress is not None and seconds >= 1:
            self._progress(stage, seconds)
        if self._budget is not None and seconds > self._budget:
            raise OutOfTimeError(stage)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the collector from running: a scan's own lists would set it off, and it would free what is counted."""
    enabled, young = gc.isenabled(), gc.get_count()[0]
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            # what was made here would set it off at once: freezing and unfreezing starts its count anew
            if gc.get_count()[0] > young and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def scan(search: Callable[[], _Found]) -> _Found:
    """Run a search with the collector paused, so that an error out of it keeps none of the search's frames.

    They hold the whole heap, and IPython keeps the frames of the last error.
    """
    try:
        with collector_paused():
            return search()
    except BaseException as error:
        raise error.with_traceback(None) from None


def subclasses_of(*bases: type) -> dict[int, type]:
    """Return classes and every class made from them, by address: a metaclass may define ``__hash__``."""
    found: dict[int, type] = {}
    stack = list(bases)
    while stack:
        kind = stack.pop()
        if id(kind) not in found:
            found[id(kind)] = kind
            stack.extend(type.__subclasses__(kind))
    return found


def _leave_out(objects: list[Any], one: object) -> None:
    """Take one object out: a heap that held itself would keep everything until the next collection."""
    for index, value in enumerate(objects):
        if value is one:
            objects[index] = objects[-1]
            objects.pop()
            return


class Heap:
    """The objects the collector tracks at one moment. Holds every one of them: drop it before reporting.

    ``frozen_roots`` are where a walk starts for what ``gc.freeze()`` hid from the collector's own list.
    """

    def __init__(self, clock: Clock, frozen_roots: Iterable[object] = ()) -> None:

        self._clock = clock
        self.objects: list[Any] = gc.get_objects()
        _leave_out(self.objects, self)
        self.frozen = gc.get_freeze_count() > 0
        if self.frozen:
            self.objects += _reachable(frozen_roots, self.objects, clock)
        self._kinds = addresses_of(map(type, self.objects), len(self.objects))
        self._hashes = hashes_of(self._kinds)
        self._references: References | None = None

    def of_kinds(self, kinds: Mapping[int, type]) -> list[Any]:
        """Return the objects whose exact type is one of ``kinds``, in the collector's order."""
        import numpy as np

        wanted = np.sort(np.fromiter(kinds, np.int64, len(kinds)))
        return [self.objects[index] for index in members(self._kinds, wanted, self._hashes).tolist()]

    def add(self, objects: Iterable[Any]) -> None:
        """Include objects that were made by looking, before anybody asks who refers to what."""
        self.objects.extend(objects)

    def referents_of_kinds(self, kinds: Mapping[int, type]) -> list[Any]:
        """Return the objects of some exact types that tracked ones refer to and the collector does not track."""
        found: dict[int, Any] = {}
        for start in range(0, len(self.objects), _CHUNK):
            for item in gc.get_referents(*self.objects[start : start + _CHUNK]):
                if id(type(item)) in kinds and not gc.is_tracked(item):
                    found[id(item)] = item
            if start % (_CHUNK * 512) == 0:
                self._clock.check("what the collector does not track")
        return list(found.values())

    def cone(
        self,
        seeds: Iterable[Any],
        parents: Mapping[int, Sequence[Any]],
        stops: Mapping[int, Any],
        beyond: Collection[int] = (),
    ) -> tuple[dict[int, Any], set[int]]:
        """Find everything from which a seed can be reached.

        Classes are found, and nobody looks beyond them: every instance refers to its class, and half a program
        to some class. Only classes whose addresses are in ``beyond`` are followed as any object is.

        Parameters
        ----------
        seeds
            The objects looked for.
        parents
            References the collector cannot see, as holders by the address of what they hold.
        stops
            Containers beyond which nobody looks, by address.

        Returns
        -------
        tuple
            The seeds and their holders by address, and the addresses of the stops that were met.
        """
        found: dict[int, Any] = {}
        met: set[int] = set()
        front = _close(seeds, parents, found, met, stops, beyond)
        if self._references is None and front:
            self._references = References(self.objects, self._clock)
        level = 0
        while front:
            self._clock.check("who holds what")
            assert self._references is not None
            holders = self._references.holders_of(front, sort=level >= _LEVELS)
            front = _close(holders, parents, found, met, stops, beyond)
            level += 1
        return found, met


def _close(
    objects: Iterable[Any],
    parents: Mapping[int, Sequence[Any]],
    found: dict[int, Any],
    met: set[int],
    stops: Mapping[int, Any],
    beyond: Collection[int],
) -> list[int]:
    """Add objects and what holds them by ``parents`` to ``found``; return the addresses that are new."""
    new: list[int] = []
    stack = list(objects)
    while stack:
        item = stack.pop()
        address = id(item)
        if address in found:
            continue
        if address in stops:
            met.add(address)
            continue
        found[address] = item
        if issubclass(type(item), type) and address not in beyond:
            continue
        new.append(address)
        stack.extend(parents.get(address, ()))
    return new


def _reachable(roots: Iterable[object], known: Sequence[object], clock: Clock) -> list[Any]:
    """Walk forward from roots and known objects to the tracked objects that are not known."""
    seen = set(map(id, known))
    found: list[Any] = []
    stack: list[Any] = [*roots, *known]
    for item in roots:
        if id(item) not in seen:
            seen.add(id(item))
            found.append(item)
    while stack:
        batch = stack[-_CHUNK:]
        del stack[-_CHUNK:]
        clock.check("frozen objects")
        for item in gc.get_referents(*batch):
            if id(item) not in seen:
                seen.add(id(item))
                if gc.is_tracked(item):
                    found.append(item)
                    stack.append(item)
    return found

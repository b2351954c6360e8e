"""torch's out-of-memory observer: one per process, and who listens to it."""

import contextlib
import time
from collections import deque
from collections.abc import Callable

from jupyter_gpumem.device import torch_module

Listener = Callable[[int, int], None]


class Observer:
    """Attached once, because torch cannot take an observer off; without a listener it does nothing."""

    def __init__(self) -> None:
        self._listener: Listener | None = None
        self._asked_for = False
        self.pauses_us: deque[tuple[int, int]] = deque(maxlen=1000)
        """When the program waited for a listener, in microseconds of the allocator's clock; the latest, in order."""

    def listen(self, listener: Listener | None) -> None:
        """Set who is told the device and the bytes asked for, before the error is raised; None for nobody.

        The listener is called on the thread that asked, which may be one of the autograd engine's.
        """
        self._listener = listener
        if listener is None:
            self.pauses_us.clear()

    def attach(self) -> None:
        """Attach at once where CUDA has started, else when it starts; never starts it."""
        torch = torch_module()
        lazily = getattr(getattr(torch, "cuda", None), "_lazy_call", None)
        known = hasattr(getattr(torch, "_C", None), "_cuda_attach_out_of_memory_observer")
        if lazily is not None and known and not self._asked_for:
            self._asked_for = True
            lazily(self._attach)

    def _attach(self) -> None:
        torch = torch_module()
        self._asked_for = self._listener is not None  # nobody listens any more: attach when somebody does
        if torch is not None and self._asked_for:
            torch._C._cuda_attach_out_of_memory_observer(self._called)

    def _called(self, device: int, asked: int, _total: int, _free: int) -> None:
        listener = self._listener
        if listener is not None:
            # torch is about to raise: an error of ours must not take its place
            began_us = time.time_ns() // 1000
            with contextlib.suppress(Exception):
                listener(device, asked)
            self._note_pause(began_us)

    def _note_pause(self, began_us: int) -> None:
        if self.pauses_us:  # another thread's may have ended meanwhile
            began_us = max(began_us, self.pauses_us[-1][1])
        self.pauses_us.append((began_us, max(began_us, time.time_ns() // 1000)))


observer = Observer()
"""The one of this process."""

import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

from jupyter_gpumem.frames import local_variables, name_of_local, running_frames


class Thing:
    pass


def failed_frame() -> tuple[FrameType, Thing]:
    thing = Thing()

    def fail(argument: Thing) -> None:
        inner = argument
        raise ValueError(inner)

    trace: Any = None
    try:
        fail(thing)
    except ValueError as error:
        trace = error.__traceback__
    return trace.tb_next.tb_frame, thing


def test_the_locals_of_a_failed_call_are_named_each_time() -> None:
    frame, thing = failed_frame()
    for _ in range(3):
        assert dict(local_variables(frame)) == {"argument": thing, "inner": thing}
    assert name_of_local(frame, thing) == "argument"


def test_looking_keeps_nothing_that_clear_would_have_freed() -> None:
    untouched, control = failed_frame()
    untouched.clear()
    frame, thing = failed_frame()
    local_variables(frame)
    frame.clear()
    assert sys.getrefcount(thing) == sys.getrefcount(control)
    assert local_variables(frame) == []


def test_looking_frees_nothing_that_was_kept() -> None:
    frame, thing = failed_frame()
    kept_before = frame.f_locals  # what IPython's traceback does
    trace = frame.f_locals if sys.version_info < (3, 13) else None
    frame.clear()
    before = sys.getrefcount(thing)
    local_variables(frame)
    assert sys.getrefcount(thing) == before
    del kept_before, trace


def test_a_suspended_generator_tells_its_locals() -> None:
    def numbers() -> Iterator[int]:
        thing = Thing()
        yield 1
        yield id(thing)

    generator = numbers()
    next(generator)
    ((name, value),) = local_variables(generator)
    assert (name, type(value)) == ("thing", Thing)
    assert name_of_local(generator, value) == "thing"


def test_an_ended_generator_has_none() -> None:
    generator = (number for number in ())
    assert list(generator) == []
    assert local_variables(generator) == []


def test_the_frames_of_this_thread_are_among_the_running_ones() -> None:
    names = [frame.f_code.co_name for _thread, frame in running_frames()]
    assert "test_the_frames_of_this_thread_are_among_the_running_ones" in names


def test_a_running_frame_keeps_its_variables() -> None:
    thing = Thing()
    frame = sys._getframe()
    assert dict(local_variables(frame))["thing"] is thing
    before = sys.getrefcount(thing)
    for _ in range(5):
        local_variables(frame)
    assert sys.getrefcount(thing) == before
    traceback.walk_stack(frame)

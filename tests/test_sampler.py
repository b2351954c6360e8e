import threading

import pytest

from jupyter_gpumem.readings import DeviceSnapshot
from jupyter_gpumem.sampler import History, Sample, Sampler


def snapshot(allocated: int, device: int = 0, used: int | None = None) -> DeviceSnapshot:
    return DeviceSnapshot(device, allocated, allocated, used, None)


def test_samples_come_back_in_order_from_a_moment_on_with_the_level_before_it() -> None:
    history = History()
    for second in range(10):
        history.add(second, snapshot(second))
    assert [sample.seconds for sample in history.since(0, 6.5)] == [6, 7, 8, 9]


def test_a_level_that_does_not_change_costs_two_samples() -> None:
    history = History()
    for second in range(1000):
        history.add(second, snapshot(5))
    assert history.since(0, 0) == [Sample(0, 5, 5, None), Sample(999, 5, 5, None)]


def test_hours_at_two_hertz_stay_within_a_bound() -> None:
    history, sizes = History(), set()
    for tick in range(3 * 7200):
        for device in range(3):
            history.add(tick / 2, snapshot(tick, device))
        if tick > 7300 and tick % 100 == 0:
            sizes.add(len(history))
    assert max(sizes) <= 3 * (600 + 3 * 660 + 20)
    assert max(sizes) - min(sizes) < 100
    assert history.since(2, 0)[0].seconds == pytest.approx(2 * 3600, abs=10)


def test_older_samples_keep_their_extremes() -> None:
    history = History()
    for tick in range(2000):
        history.add(tick / 2, snapshot(777 if tick == 123 else 1 if tick == 456 else 50 + tick % 2))
    levels = [sample.allocated_bytes for sample in history.since(0, 0)]
    assert max(levels) == 777
    assert min(levels) == 1
    assert len(levels) <= 600 + 3 * 140 + 10


def test_what_is_older_than_the_span_goes_but_for_the_level_at_its_start() -> None:
    history = History()
    for second in range(0, 8001, 50):
        history.add(second, snapshot(second))
    assert [sample.seconds for sample in history.since(0, -1)] == list(range(4400, 8001, 50))


def test_devices_have_histories_of_their_own() -> None:
    history = History()
    history.add(0, snapshot(1, device=0))
    history.add(0, snapshot(2, device=1, used=9))
    assert history.since(1, 0) == [Sample(0, 2, 2, 9)]
    assert history.since(2, 0) == []


def test_the_thread_ticks_until_it_is_stopped_and_can_start_again() -> None:
    ticked = threading.Event()
    sampler = Sampler(ticked.set, interval_seconds=0.001)
    for _ in range(2):
        ticked.clear()
        sampler.start()
        assert ticked.wait(10)
        sampler.stop()
        assert not sampler.running


def test_start_and_stop_twice_are_one() -> None:
    sampler = Sampler(lambda: None, interval_seconds=60)
    before = threading.active_count()
    sampler.start()
    sampler.start()
    assert threading.active_count() == before + 1
    sampler.stop()
    sampler.stop()
    assert threading.active_count() == before


def test_a_poke_ticks_at_once_whatever_the_interval() -> None:
    ticks = threading.Semaphore(0)
    sampler = Sampler(ticks.release, interval_seconds=3600)
    sampler.start()
    assert ticks.acquire(timeout=10)
    sampler.poke()
    assert ticks.acquire(timeout=10)
    sampler.stop()


def test_stopping_does_not_wait_for_the_interval() -> None:
    sampler = Sampler(lambda: None, interval_seconds=3600)
    sampler.start()
    sampler.stop()
    assert not sampler.running


def test_a_tick_that_fails_prints_nothing_and_the_next_one_comes(capfd: pytest.CaptureFixture[str]) -> None:
    answers = iter([ValueError("boom"), None])

    def tick() -> None:
        answer = next(answers)
        if answer is not None:
            raise answer

    sampler = Sampler(tick, interval_seconds=60)
    sampler.step()
    assert isinstance(sampler.failure, ValueError)
    assert sampler.failure.__traceback__ is None
    sampler.step()
    assert sampler.failure is None
    assert capfd.readouterr() == ("", "")


def test_a_sampler_may_stop_itself_from_its_own_tick() -> None:
    done = threading.Event()

    def tick() -> None:
        sampler.stop()
        done.set()

    sampler = Sampler(tick, interval_seconds=0.001)
    sampler.start()
    assert done.wait(10)

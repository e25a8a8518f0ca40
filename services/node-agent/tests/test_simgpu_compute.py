"""How the SMs of a simulated device are shared: durations follow from the neighbours alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.node_agent.simgpu.compute import DeviceClock

SECOND = 1_000_000


def ends_of(clock: DeviceClock) -> dict[int, float]:
    clock.advance(1000 * SECOND)
    return dict(clock.take_done())


def a_clock(*streams: tuple[int, object, float], sms: int = 100) -> DeviceClock:
    clock = DeviceClock(sms)
    for number, group, cap in streams:
        clock.open(number, group, cap, 0)
    return clock


def test_alone_a_kernel_takes_what_it_says() -> None:
    clock = a_clock((1, "a", 100))
    clock.submit(1, 100, 500, 0)
    assert ends_of(clock) == {1: 500}


def test_processes_take_turns() -> None:
    """Without MPS, two processes that keep a device busy take twice as long each."""
    clock = a_clock((1, "a", 100), (2, "b", 100))
    clock.submit(1, 100, 500, 0)
    clock.submit(2, 100, 500, 0)
    assert ends_of(clock) == {1: 1000, 2: 1000}


def test_clients_of_one_server_within_their_caps_do_not_disturb_each_other() -> None:
    clock = a_clock((1, "mps", 50), (2, "mps", 50))
    clock.submit(1, 50, 500, 0)
    clock.submit(2, 50, 900_000, 0)
    assert ends_of(clock) == {1: 500, 2: 900_000}


def test_a_cap_makes_a_wide_kernel_slower() -> None:
    clock = a_clock((1, "mps", 25))
    clock.submit(1, 100, 500, 0)
    assert ends_of(clock) == {1: 2000}


def test_clients_without_caps_crowd_each_other_by_what_they_want() -> None:
    """So a hog harms a neighbour whose kernels would have fitted beside it: nothing was configured against that."""
    clock = a_clock((1, "mps", 100), (2, "mps", 100))
    clock.submit(1, 20, 500, 0)
    clock.submit(2, 100, 500, 0)
    assert ends_of(clock) == {1: pytest.approx(600), 2: pytest.approx(600)}


def test_the_sms_of_a_partition_are_its_own() -> None:
    clock = a_clock((9, "other", 100))
    clock.open(1, "mps", 100, 0, partition="a")
    clock.open(2, "mps", 100, 0, partition="b")
    clock.open(3, "mps", 100, 0)
    clock.keep("mps", {"a": 40, "b": 24}, 0)
    for stream in (1, 2, 3):
        clock.submit(stream, 100, 360, 0)
    ends = ends_of(clock)
    assert ends == {1: pytest.approx(900), 2: pytest.approx(1500), 3: pytest.approx(1000)}


@pytest.mark.parametrize(("bound", "with_hog"), [("sm", 500), ("l2", 750), ("dram", 1000)])
def test_cache_and_bandwidth_are_shared_however_the_sms_are_split(bound: str, with_hog: int) -> None:
    """Alone a kernel takes what it says, whatever it is bound by."""
    clock = a_clock((1, "mps", 50), (2, "mps", 50))
    clock.submit(1, 50, 500, 0, bound=bound)
    assert ends_of(clock) == {1: pytest.approx(500)}
    clock = a_clock((1, "mps", 50), (2, "mps", 50))
    clock.submit(1, 50, 500, 0, bound=bound)
    clock.submit(2, 50, 900_000, 0, bound=bound)
    assert ends_of(clock)[1] == pytest.approx(with_hog)


def test_a_neighbour_that_leaves_gives_its_turns_back() -> None:
    clock = a_clock((1, "a", 100), (2, "b", 100))
    clock.submit(1, 100, 1000, 0)
    clock.submit(2, 100, 9000, 0)
    clock.close(2, 1000)
    assert ends_of(clock) == {1: 1500}


def test_use_over_the_last_second_is_reported_and_fades() -> None:
    clock = a_clock((1, "mps", 25))
    clock.submit(1, 25, SECOND // 2, 0)
    clock.advance(SECOND)
    assert clock.active.growth_fraction(SECOND, 1) == pytest.approx(0.5)
    assert clock.used.growth_fraction(SECOND, 100) == pytest.approx(0.125)
    assert clock.sm_use_fraction(1, SECOND) == pytest.approx(0.125)
    clock.advance(3 * SECOND)
    assert clock.active.growth_fraction(3 * SECOND, 1) == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 150), st.integers(1, 5000), st.integers(0, 2000)),
        min_size=1,
        max_size=25,
    )
)
def test_no_more_work_is_done_than_the_device_has_time_for(kernels: list[tuple[int, int, int, int]]) -> None:
    """Whatever comes when, all work is done, none faster than alone, and never more than the SMs could do."""
    clock = a_clock((0, "mps", 50), (1, "mps", 60), (2, "a", 100), (3, "b", 100))
    now, work = 0, 0
    for stream, sms, us, pause in kernels:
        now += pause
        clock.submit(stream, sms, us, now)
        work += min(sms, 100) * us
    clock.advance(now + 1000 * SECOND)
    done = clock.take_done()
    assert len(done) == len(kernels)
    assert clock.used.total == pytest.approx(work, rel=1e-6)
    assert clock.used.total <= 100 * (max(end for _, end in done) + 1)


def test_kernels_end_after_a_year_of_uptime_too() -> None:
    """A clock that counts in floats must not wait for a remainder that it can't represent."""
    year = 365 * 86400 * SECOND
    clock = a_clock((1, "a", 100), (2, "b", 33), (3, "c", 7))
    clock.advance(year)
    for stream in (1, 2, 3):
        for _ in range(50):
            clock.submit(stream, 97, 1237, year)
    clock.advance(year + 100 * SECOND)
    assert len(clock.take_done()) == 150

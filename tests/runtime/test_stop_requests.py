"""SIGTERM and SIGUSR1: noted, agreed on, and given back."""

import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from rota.runtime import control
from rota.runtime.stop_requests import SAME_REQUEST_S, SIGNALS, StopRequests


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What reaches the handlers that were there before, which take the place of those that end the process."""
    reached: list[int] = []
    before = {number: signal.signal(number, lambda number, _: reached.append(number)) for number in SIGNALS}
    yield reached
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The other end of this process's line."""
    ours, theirs = control.make_pair()
    for name, value in control.environment_of(theirs.fileno(), os.getpid()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(control, "_connection", None)
    assert control.connect() == os.getpid()
    yield ours
    ours.close()
    theirs.detach()
    control._connection.close()  # by the same number


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_passed_on(heard: list[int], number: signal.Signals) -> None:
    stops = StopRequests(is_first=False)
    send(number)
    assert not stops.asked()  # nobody has looked yet
    stops.listen()
    stops.listen()
    send(number)
    assert stops.asked()
    assert heard == [number, number]
    stops.close()
    send(number)
    assert heard == [number] * 3
    stops.close()


def test_signals_soon_after_the_first_are_the_same_request(heard: list[int]) -> None:
    clock_s = [0.0]
    stops = StopRequests(is_first=False, now=lambda: clock_s[0])
    stops.listen()
    send(signal.SIGTERM)
    clock_s[0] = SAME_REQUEST_S
    send(signal.SIGTERM)
    handler = signal.getsignal(signal.SIGTERM)
    clock_s[0] = SAME_REQUEST_S + 0.1
    send(signal.SIGTERM)  # what was there before is there again, and gets it
    assert signal.getsignal(signal.SIGTERM) != handler
    assert heard == [signal.SIGTERM] * 3


def test_after_a_failure_a_signal_that_nobody_saw_has_its_effect(heard: list[int]) -> None:
    for agreed in (False, True):
        heard.clear()
        stops = StopRequests(is_first=False)
        stops.listen()
        send(signal.SIGUSR1)
        stops.agreed = agreed
        stops.close(failed=True)
        assert heard == [signal.SIGUSR1] * (1 if agreed else 2)


def test_a_handler_that_came_later_stays(heard: list[int]) -> None:
    stops = StopRequests(is_first=False)
    stops.listen()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    stops.close()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_other_threads_set_no_handlers(heard: list[int]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    stops = StopRequests(is_first=False)
    thread = threading.Thread(target=stops.listen)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    stops.close()


def test_two_pipelines_hear_the_same_signal(heard: list[int]) -> None:
    both = [StopRequests(is_first=False) for _ in range(2)]
    for stops in both:
        stops.listen()
    send(signal.SIGTERM)
    assert [stops.asked() for stops in both] == [True, True]
    for stops in reversed(both):
        stops.close()
    assert heard == [signal.SIGTERM]


def test_a_process_forked_from_a_rank_ends_as_ever() -> None:
    stops = StopRequests(is_first=False)
    stops.listen()
    try:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not stops.asked()
    finally:
        stops.close()


def test_the_launcher_asks_the_first_rank(supervisor: socket.socket) -> None:
    first, other = StopRequests(is_first=True), StopRequests(is_first=False)
    assert control.received(supervisor) == ([], True)
    for stops in (first, other):
        stops.listen()
    assert control.received(supervisor) == ([control.Message("listens")], True)
    assert not first.asked()
    supervisor.send(control.STOP)
    assert (first.asked(), other.asked()) == (True, False)
    assert first.asked()
    for stops in (other, first):
        stops.close()

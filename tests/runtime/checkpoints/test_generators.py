"""The states of Python's and NumPy's generators are those that the libraries tell, and are read only after a draw."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest

from rota.errors import PipelineError
from rota.runtime.checkpoints import generators
from rota.runtime.checkpoints.generators import Generators


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    of_python, of_numpy, generator = random.getstate(), numpy.random.get_state(), numpy.random.get_bit_generator()
    yield
    numpy.random.set_bit_generator(generator)
    random.setstate(of_python)
    numpy.random.set_state(of_numpy)


def set_back(act: Callable[[], object]) -> Callable[[], None]:
    """Do it, and set the states from before."""

    def do() -> None:
        of_python, of_numpy = random.getstate(), numpy.random.get_state()
        act()
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)

    return do


def change_words_alone() -> None:
    version, (first, *words), gauss = random.getstate()
    random.setstate((version, (first ^ 1, *words), gauss))
    name, key, *rest = numpy.random.get_state()
    key[623] ^= 1
    numpy.random.set_state((name, key, *rest))


def change_gauss_alone() -> None:
    version, words, _ = random.getstate()
    random.setstate((version, words, 0.25))
    name, key, position, has_gauss, gauss = numpy.random.get_state()
    numpy.random.set_state((name, key, position, 1 - has_gauss, gauss))


def negate_zero() -> None:
    version, words, gauss = random.getstate()
    random.setstate((version, words, -0.0 if repr(gauss) == "0.0" else 0.0))
    name, key, position, _, gauss = numpy.random.get_state()
    numpy.random.set_state((name, key, position, 1, -0.0 if repr(float(gauss)) == "0.0" else 0.0))


DRAWS: list[Callable[[], object]] = [
    random.random,
    lambda: random.gauss(0, 1),
    lambda: random.gauss(0, 1),
    lambda: random.seed(3),
    lambda: [random.random() for _ in range(624)],
    lambda: random.getrandbits(1),
    lambda: random.shuffle([1, 2, 3]),
    numpy.random.standard_normal,
    numpy.random.standard_normal,
    lambda: numpy.random.normal(size=3),
    lambda: numpy.random.seed(3),
    lambda: numpy.random.permutation(700),
    lambda: numpy.random.binomial(10, 0.3),
    lambda: numpy.random.bytes(1),
    lambda: numpy.random.get_bit_generator().random_raw(),
    lambda: numpy.random.default_rng(3).random(),
    lambda: numpy.random.set_bit_generator(numpy.random.MT19937(5)),
    lambda: numpy.random.set_state(("MT19937", [7] * 624, 3)),
    set_back(lambda: (random.random(), numpy.random.standard_normal())),
    change_words_alone,
    change_gauss_alone,
    change_gauss_alone,
    negate_zero,
    negate_zero,
    lambda: None,
]


def told_by_libraries() -> str:
    """To the bit."""
    kind, key, *rest = numpy.random.get_state()
    return repr((random.getstate(), kind, key.tolist(), [float(value).hex() for value in rest]))


def told_by(known: Generators) -> str:
    of_numpy = known.numpy()
    assert of_numpy is not None
    kind, key, *rest = of_numpy.to_numpy()
    return repr((known.python().to_python(), kind, key.tolist(), [float(value).hex() for value in rest]))


@pytest.mark.parametrize("is_known", [True, False])
def test_states_are_those_of_the_libraries_after_any_draw(monkeypatch: pytest.MonkeyPatch, is_known: bool) -> None:
    monkeypatch.setattr(generators, "_is_python_known_by_contents", lambda: is_known)
    monkeypatch.setattr(generators, "_is_numpy_known_by_contents", lambda: is_known)
    known, order = Generators(), random.Random(0)
    for draw in [*DRAWS, *(order.choice(DRAWS) for _ in range(200))]:
        draw()
        assert told_by(known) == told_by_libraries()


def test_states_are_read_only_after_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = dict.fromkeys(("_read_python", "_read_numpy"), 0)

    def counted(name: str) -> Callable[[], Any]:
        read = getattr(generators, name)

        def counting() -> Any:
            num_read[name] += 1
            return read()

        return counting

    for name in num_read:
        monkeypatch.setattr(generators, name, counted(name))
    known = Generators()
    for draw, expected in (
        (lambda: None, [1, 1]),
        (set_back(lambda: None), [1, 1]),
        (set_back(lambda: (random.gauss(0, 1), numpy.random.standard_normal())), [1, 1]),
        (random.random, [2, 1]),
        (numpy.random.standard_normal, [2, 2]),
        (numpy.random.standard_normal, [2, 3]),
    ):
        draw()
        for _ in range(2):
            assert told_by(known) == told_by_libraries()
        assert [*num_read.values()] == expected


def test_generators_still_have_all_of_their_state_in_their_objects() -> None:
    assert generators._is_python_known_by_contents()
    assert generators._is_numpy_known_by_contents()


@pytest.mark.parametrize("objects", [lambda made: (made,), lambda made: (vars(made).get("gauss_next"),)])
def test_a_python_that_has_its_state_elsewhere_is_noticed(monkeypatch: pytest.MonkeyPatch, objects: Any) -> None:
    monkeypatch.setattr(generators, "_objects_of_python", objects)
    assert not generators._is_python_known_by_contents.__wrapped__()


@pytest.mark.parametrize("objects", [lambda made: (made,), lambda made: (made._bit_generator,)])
def test_a_numpy_that_has_its_state_elsewhere_is_noticed(monkeypatch: pytest.MonkeyPatch, objects: Any) -> None:
    monkeypatch.setattr(generators, "_objects_of_numpy", objects)
    assert not generators._is_numpy_known_by_contents.__wrapped__()


def test_another_generator_of_numpy_is_refused() -> None:
    known = Generators()
    known.numpy()
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    with pytest.raises(PipelineError, match="NumPy's random generator is PCG64, but"):
        known.numpy()

"""The batches of a training, in an order that a restart continues: no sample is lost, none is seen twice.

    seed, epoch ──▶ the sampler's epoch, and random numbers of the loader's own ──▶ batch 0, 1, 2, 3 …
    after a restart that goes on from 2 batches: the same, batches 0 and 1 are loaded and dropped ──▶ 2, 3 …

The loader draws from random numbers of its own, so that its order depends on the seed and the epoch alone: not on what
training draws, nor on when the loader is asked.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch

from rota.core.errors import PipelineError
from rota.core.reading import LARGEST, Field
from rota.runtime.checkpoints.random_states import random_state, set_random_state
from rota.runtime.compute import seed_of
from rota.runtime.fingerprints import fingerprint

_CPU = torch.device("cpu")
_FIELDS = ("seed", "epoch", "num_batches", "num_replicas", "length", "first")


@final
class Batches:
    """The batches of `num_epochs` epochs of `loader`; iterate once.

    Args:
        loader: a DataLoader, or anything else that can be iterated again and again.
        num_epochs: how many epochs there are in all.
        seed: of all that the loader draws.
        num_replicas: of the training.
        share: gathers a JSON value of each replica, on all processes.
    """

    def __init__(
        self,
        loader: Any,
        num_epochs: int,
        seed: int,
        num_replicas: int,
        share: Callable[[Any], list[Any]],
    ) -> None:
        _require_again(loader)
        if type(num_epochs) is not int or num_epochs < 1:
            raise PipelineError(f"num_epochs={num_epochs!r}; give the number of epochs in all, 1 or more")
        if type(seed) is not int or not 0 <= seed <= LARGEST:
            raise PipelineError(f"seed={seed!r}; give a whole number from 0 to {LARGEST}")
        self._loader, self._num_epochs, self._seed = loader, num_epochs, seed
        self._num_replicas, self._share = num_replicas, share
        self._epoch, self._num_batches = 0, 0
        self._length: int | None = None  # of the epoch, in batches; None if it has not begun, or does not say
        self._first: list[str] = []  # fingerprints of each replica's first batch; "" is of what cannot be compared

    @property
    def position(self) -> dict[str, Any]:
        """Where the next batch is, as JSON: for `go_on` in another process."""
        values = (self._seed, self._epoch, self._num_batches, self._num_replicas, self._length, self._first)
        return dict(zip(_FIELDS, values, strict=True))

    def go_on(self, position: Field) -> None:
        """Begin at a `position`. Raises PipelineError or FormatError if it is none of this loader's."""
        position.refuse_others(_FIELDS)
        seed, epoch, num_batches, num_replicas = (position[name].integer(0) for name in _FIELDS[:4])
        if seed != self._seed:
            raise PipelineError(f"seed={self._seed}, but the training has had the seed {seed} so far; give that one")
        length = position["length"].integer_or_none(0)
        if num_batches and num_batches == length:  # it was saved after the epoch's last batch
            epoch, num_batches = epoch + 1, 0
        if num_batches and num_replicas != self._num_replicas:
            raise PipelineError(
                f"epoch {epoch} was begun by {num_replicas} replicas, and cannot be gone on with by "
                f"{self._num_replicas}: each gets other samples; use {num_replicas} until its end"
            )
        self._epoch, self._num_batches = epoch, num_batches
        if num_batches:
            self._length, self._first = length, [value.text() for value in position["first"]]
            if len(self._first) != num_replicas:
                raise position["first"].wrong(f"one text for each of the {num_replicas} replicas")

    def __iter__(self) -> Iterator[Any]:
        while self._epoch < self._num_epochs:
            yield from self._rest_of_epoch()
            self._epoch, self._num_batches, self._length, self._first = self._epoch + 1, 0, None, []

    def _rest_of_epoch(self) -> Iterator[Any]:
        seed, own = seed_of(self._seed, self._epoch), dict[str, Any]()
        with _drawing(own):
            _set_seed(seed)
            _begin_epoch(self._loader, self._epoch, seed)
            batches = iter(self._loader)
        number, none = 0, object()
        while True:
            with _drawing(own):
                batch = next(batches, none)
            if batch is none:
                break
            if number == 0:
                self._compare(batch)
            number += 1
            if number > self._num_batches:
                self._num_batches = number
                yield batch
        if number < self._num_batches:
            raise PipelineError(
                f"epoch {self._epoch} has {number} batches, but {self._num_batches} of it were trained before: the "
                f"data has changed; go on with the same"
            )

    def _compare(self, batch: Any) -> None:
        """Refuse data in another order than before the restart. Collective."""
        told = self._share([_length_of(self._loader), fingerprint(batch)])
        first = [first for _, first in told]
        for replica, (before, now) in enumerate(zip(self._first or first, first, strict=True)):
            if before and now and before != now:
                where = f" on replica {replica}" if self._num_replicas > 1 else ""
                raise PipelineError(
                    f"the first batch of epoch {self._epoch}{where} differs from the one before: samples would be lost "
                    f"or seen twice; go on with the same data and batch size, and make sure that whatever shuffles "
                    f"uses the random numbers of torch, random or numpy.random, or has a set_epoch"
                )
        if not self._first:
            self._length, self._first = told[0][0], first


def _length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _require_again(loader: Any) -> None:
    if getattr(loader, "persistent_workers", False):
        raise PipelineError(
            "the loader has persistent_workers=True, whose random numbers no restart can continue; leave it out"
        )
    if isinstance(loader, Iterator):
        raise PipelineError(
            f"a {type(loader).__name__} can be iterated only once, so no restart can go on with it; give a DataLoader"
        )
    if not isinstance(loader, Iterable):
        raise PipelineError(f"a {type(loader).__name__} has no batches; give a DataLoader")


def _begin_epoch(loader: Any, epoch: int, seed: int) -> None:
    """Tell all that shuffles which epoch it is, in either of the ways that there are."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [loader, *(getattr(loader, name, None) for name in ("dataset", "sampler")), batch_sampler]
    for part in [*parts, getattr(batch_sampler, "sampler", None)]:
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)
        if isinstance(generator := getattr(part, "generator", None), torch.Generator):
            generator.manual_seed(seed)


@contextmanager
def _drawing(own: dict[str, Any]) -> Iterator[None]:
    """Inside, all that draws random numbers draws those of `own` state, which is empty before it is first used."""
    of_training = random_state(_CPU)
    if own:
        set_random_state(own, _CPU)
    try:
        yield
    finally:
        own.update(random_state(_CPU))
        set_random_state(of_training, _CPU)


def _set_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would also set accelerators' generators
    random.seed(seed)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed(seed % 2**32)

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
from typing import Any, final

import msgspec
import torch

from rota.core.errors import PipelineError
from rota.core.reading import LARGEST, Field, Positive, Whole
from rota.runtime.checkpoints.random_states import random_state, set_random_state
from rota.runtime.compute import seed_of
from rota.runtime.fingerprints import fingerprint

_CPU = torch.device("cpu")


class Position(msgspec.Struct, forbid_unknown_fields=True):
    """Where the next batch is, after `num_batches` of an epoch.

    `length`: of the epoch, in batches; None if it has not begun, or does not say. `first`: fingerprints of each
    replica's first batch; "" is of what cannot be compared.
    """

    seed: Whole
    epoch: Whole
    num_batches: Whole
    num_replicas: Positive
    length: Whole | None
    first: list[str]


@final
class Batches:
    """The batches of `num_epochs` epochs of `loader`, which can be iterated again and again; iterate this once.

    `seed`: of all that the loader draws. `num_replicas`: of the training. `share` gathers a JSON value of each replica,
    on all processes.
    """

    def __init__(
        self, loader: Any, num_epochs: int, seed: int, num_replicas: int, share: Callable[[Any], list[Any]]
    ) -> None:
        _require_again(loader)
        if type(num_epochs) is not int or num_epochs < 1:
            raise PipelineError(f"num_epochs={num_epochs!r}; give the number of epochs in all, 1 or more")
        if type(seed) is not int or not 0 <= seed <= LARGEST:
            raise PipelineError(f"seed={seed!r}; give a whole number from 0 to {LARGEST}")
        self._loader, self._num_epochs, self._share = loader, num_epochs, share
        self._at = Position(seed, 0, 0, num_replicas, None, [])

    @property
    def position(self) -> dict[str, Any]:
        """Where the next batch is, as JSON: for `go_on` in another process."""
        position: dict[str, Any] = msgspec.to_builtins(self._at)
        return position

    def go_on(self, position: Field) -> None:
        """Begin at a `position`. Raises PipelineError or FormatError if it is none of this loader's."""
        at, now = position.read(Position), self._at
        if at.seed != now.seed:
            raise PipelineError(f"seed={now.seed}, but the training has had the seed {at.seed} so far; give that one")
        if at.num_batches == 0 or at.num_batches == at.length:  # it was saved after the epoch's last batch
            now.epoch = at.epoch + (at.num_batches > 0)
            return
        if at.num_replicas != now.num_replicas:
            raise PipelineError(
                f"epoch {at.epoch} was begun by {at.num_replicas} replicas, and cannot be gone on with by "
                f"{now.num_replicas}: each gets other samples; use {at.num_replicas} until its end"
            )
        if len(at.first) != at.num_replicas:
            raise position["first"].wrong(f"one text for each of the {at.num_replicas} replicas")
        self._at = at

    def __iter__(self) -> Iterator[Any]:
        while self._at.epoch < self._num_epochs:
            yield from self._rest_of_epoch()
            self._at = Position(self._at.seed, self._at.epoch + 1, 0, self._at.num_replicas, None, [])

    def _rest_of_epoch(self) -> Iterator[Any]:
        at = self._at
        seed, own = seed_of(at.seed, at.epoch), _OwnDraws()
        with own:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would also set accelerators' generators
            random.seed(seed)
            if (numpy := sys.modules.get("numpy.random")) is not None:
                numpy.seed(seed % 2**32)
            _begin_epoch(self._loader, at.epoch, seed)
            batches = iter(self._loader)
        number, none = 0, object()
        while True:
            with own:
                batch = next(batches, none)
            if batch is none:
                break
            if number == 0:
                self._compare(batch)
            number += 1
            if number > at.num_batches:
                at.num_batches = number
                yield batch
        if number < at.num_batches:
            raise PipelineError(
                f"epoch {at.epoch} has {number} batches, but {at.num_batches} of it were trained before: the data has "
                f"changed; go on with the same"
            )

    def _compare(self, batch: Any) -> None:
        """Refuse data in another order than before the restart. Collective."""
        at = self._at
        (length, _), *_ = of_replicas = self._share([_length_of(self._loader), fingerprint(batch)])
        first = [first for _, first in of_replicas]
        for replica, (before, now) in enumerate(zip(at.first or first, first, strict=True)):
            if before and now and before != now:
                where = f" on replica {replica}" if at.num_replicas > 1 else ""
                raise PipelineError(
                    f"the first batch of epoch {at.epoch}{where} differs from the one before: samples would be lost "
                    f"or seen twice; go on with the same data and batch size, and make sure that whatever shuffles "
                    f"uses the random numbers of torch, random or numpy.random, or has a set_epoch"
                )
        if not at.first:
            at.length, at.first = length, first


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


class _OwnDraws:
    """Inside, all that draws random numbers draws from a state of its own: first from that of before."""

    def __init__(self) -> None:
        self._own, self._outside = random_state(_CPU), random_state(_CPU)

    def __enter__(self) -> None:
        self._outside = random_state(_CPU)
        set_random_state(self._own, _CPU)

    def __exit__(self, *_: object) -> None:
        self._own = random_state(_CPU)
        set_random_state(self._outside, _CPU)

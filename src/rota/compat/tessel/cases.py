"""Tessel's placements, as Tessel draws them. With `train=False` they are inference forms, which allocate no memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

from rota.compat.tessel.schedule.schedplan import Block, SchedPlan
from rota.core.errors import ScheduleError


class _Stage(NamedTuple):
    """A stage on one or several devices; one with `backward` 0 has no backward."""

    devices: Sequence[int]
    backward: int  # steps
    memory: int


@final
class Placement:
    """Placements by shape. Each forward lasts 1 step; a stage on one device needs memory 1, and 3 steps backward."""

    @staticmethod
    def vshape(ndevs: int, train: bool = True) -> SchedPlan:
        """A chain of stages, one per device.

        f             b
          f         b
            f     b
              f b
        """
        return _forward_and_backward(ndevs, train, _chain(ndevs))

    @staticmethod
    def xshape(ndevs: int, train: bool = True) -> SchedPlan:
        """Two chains in opposite directions.

        f     f b     b
          f f     b b
          f f     b b
        f     f b     b
        """
        return _forward_and_backward(ndevs, train, _chain(ndevs), _chain(ndevs)[::-1])

    @staticmethod
    def mshape(ndevs: int, train: bool = True) -> SchedPlan:
        """A chain behind an embedding on all devices.

        f f             b b
        f   f         b   b
        f     f     b     b
        f       f b       b
        """
        return _forward_and_backward(ndevs, train, [_shared(ndevs), *_chain(ndevs)])

    @staticmethod
    def nnshape(ndevs: int, train: bool = True) -> SchedPlan:
        """Two half chains, each behind a layer on all devices.

        f f   f         b   b b
        f   f f         b b   b
        f     f f     b b     b
        f     f   f b   b     b
        """
        chain, half = _chain(ndevs), ndevs // 2
        return _forward_and_backward(ndevs, train, [_shared(ndevs), *chain[:half], _shared(ndevs), *chain[half:]])

    @staticmethod
    def nnshape_eager(ndevs: int, train: bool = True) -> SchedPlan:
        """As `nnshape`, with the second shared layer directly after the first stage.

        f f f             b b b
        f   f f         b b   b
        f   f   f     b   b   b
        f   f     f b     b   b
        """
        first, *others = _chain(ndevs)
        return _forward_and_backward(ndevs, train, [_shared(ndevs), first, _shared(ndevs), *others])

    @staticmethod
    def mllm(ndevs: int, train: bool = True) -> SchedPlan:
        """A chain between two layers on all devices.

        f f       f b       b b
        f   f     f b     b   b
        f     f   f b   b     b
        f       f f b b       b
        """
        return _forward_and_backward(ndevs, train, [_shared(ndevs), *_chain(ndevs), _shared(ndevs)])

    @staticmethod
    def kshape(ndevs: int, train: bool = True) -> SchedPlan:
        """Two branches, each on half of the devices, that meet in a stage on all devices.

        f   f b   b
          f f b b
        f   f b   b
          f f b b
        """
        if ndevs < 2 or ndevs % 2:
            raise ScheduleError(f"ndevs is {ndevs}; kshape needs an even number, a half for each branch")
        chain, half = _chain(ndevs), ndevs // 2
        return _forward_and_backward(ndevs, train, chain[:half], chain[half:], meeting=_Stage(range(ndevs), 1, 1))

    @staticmethod
    def finetune(ndevs: int, train: bool = True) -> SchedPlan:
        """A chain behind a frozen layer on all devices.

        f f             b
        f   f         b
        f     f     b
        f       f b
        """
        return _forward_and_backward(ndevs, train, [_Stage(range(ndevs), 0, 0), *_chain(ndevs, 2)])

    @staticmethod
    def alphafold(ndevs: int, train: bool = True) -> SchedPlan:
        """Three forward passes, of which only the last one has a backward.

        f       f       f             b
          f       f       f         b
            f       f       f     b
              f       f       f b
        """
        frozen = _chain(ndevs, 0, 0)
        return _forward_and_backward(ndevs, train, [*frozen, *frozen, *_chain(ndevs, 1)])


#: The placements by the names that the command takes.
PLACEMENTS = {name: value.__func__ for name, value in vars(Placement).items() if isinstance(value, staticmethod)}


def _chain(ndevs: int, backward: int = 3, memory: int = 1) -> list[_Stage]:
    if not isinstance(ndevs, int) or ndevs < 1:
        raise ScheduleError(f"ndevs is {ndevs!r}; a placement needs 1 device or more")
    return [_Stage([device], backward, memory) for device in range(ndevs)]


def _shared(ndevs: int) -> _Stage:
    return _Stage(range(ndevs), 1, 0)


def _forward_and_backward(
    ndevs: int, train: bool, *chains: Sequence[_Stage], meeting: _Stage | None = None
) -> SchedPlan:
    """Return each chain forward and then backward, all of them through `meeting` in between."""
    schedule = SchedPlan(ndevs)
    middle = [] if meeting is None else _blocks([meeting], train)
    for chain in chains:
        blocks = _blocks(chain, train)
        half = len(chain)
        pairs = [*blocks[:half], *middle, *blocks[half:]]
        schedule.add_block_seq([block for block, _ in pairs], [devices for _, devices in pairs])
    return schedule


def _blocks(chain: Sequence[_Stage], train: bool) -> list[tuple[Block, Sequence[int]]]:
    """Return the forward blocks of a chain, then its backward blocks, with their devices."""
    blocks = [(Block(0, 1, stage.memory if train else 0, "forward"), stage.devices) for stage in chain]
    if train:
        back = [stage for stage in reversed(chain) if stage.backward]
        blocks += [(Block(0, stage.backward, -stage.memory, "backward"), stage.devices) for stage in back]
    return blocks

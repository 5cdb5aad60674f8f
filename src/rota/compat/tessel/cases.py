"""Tessel's placements, as it draws them; `train=False`: their inference forms, which hold no memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

from rota.compat.tessel.schedule.block import Block
from rota.compat.tessel.schedule.schedplan import SchedPlan
from rota.errors import ScheduleError


class _Stage(NamedTuple):
    """`backward` 0: it has none."""

    devices: Sequence[int]
    backward: int = 3
    memory: int = 1


@final
class Placement:
    """Each forward takes a step. On devices of its own a stage takes 1 of memory, and 3 steps backward."""

    @staticmethod
    def vshape(ndevs: int, train: bool = True) -> SchedPlan:
        """
        f             b
          f         b
            f     b
              f b
        """
        return _there_and_back(ndevs, train, _chain(ndevs))

    @staticmethod
    def xshape(ndevs: int, train: bool = True) -> SchedPlan:
        """
        f     f b     b
          f f     b b
          f f     b b
        f     f b     b
        """
        return _there_and_back(ndevs, train, _chain(ndevs), _chain(ndevs)[::-1])

    @staticmethod
    def mshape(ndevs: int, train: bool = True) -> SchedPlan:
        """
        f f             b b
        f   f         b   b
        f     f     b     b
        f       f b       b
        """
        return _there_and_back(ndevs, train, [_shared(ndevs), *_chain(ndevs)])

    @staticmethod
    def nnshape(ndevs: int, train: bool = True) -> SchedPlan:
        """
        f f   f         b   b b
        f   f f         b b   b
        f     f f     b b     b
        f     f   f b   b     b
        """
        chain, half = _chain(ndevs), ndevs // 2
        return _there_and_back(ndevs, train, [_shared(ndevs), *chain[:half], _shared(ndevs), *chain[half:]])

    @staticmethod
    def nnshape_eager(ndevs: int, train: bool = True) -> SchedPlan:
        """
        f f f             b b b
        f   f f         b b   b
        f   f   f     b   b   b
        f   f     f b     b   b
        """
        first, *others = _chain(ndevs)
        return _there_and_back(ndevs, train, [_shared(ndevs), first, _shared(ndevs), *others])

    @staticmethod
    def mllm(ndevs: int, train: bool = True) -> SchedPlan:
        """
        f f       f b       b b
        f   f     f b     b   b
        f     f   f b   b     b
        f       f f b b       b
        """
        return _there_and_back(ndevs, train, [_shared(ndevs), *_chain(ndevs), _shared(ndevs)])

    @staticmethod
    def kshape(ndevs: int, train: bool = True) -> SchedPlan:
        """
        f   f b   b
          f f b b
        f   f b   b
          f f b b
        """
        if ndevs < 2 or ndevs % 2:
            raise ScheduleError(f"ndevs is {ndevs}; kshape needs an even number, a half for each branch")
        chain, half = _chain(ndevs), ndevs // 2
        return _there_and_back(ndevs, train, chain[:half], chain[half:], meeting=_Stage(range(ndevs), 1))

    @staticmethod
    def finetune(ndevs: int, train: bool = True) -> SchedPlan:
        """
        f f             b
        f   f         b
        f     f     b
        f       f b
        """
        frozen = _Stage(range(ndevs), 0, 0)
        return _there_and_back(ndevs, train, [frozen, *(_Stage([device], 2) for device in range(ndevs))])

    @staticmethod
    def alphafold(ndevs: int, train: bool = True) -> SchedPlan:
        """
        f       f       f             b
          f       f       f         b
            f       f       f     b
              f       f       f b
        """
        frozen = [_Stage([device], 0, 0) for device in range(ndevs)]
        return _there_and_back(ndevs, train, [*frozen, *frozen, *(_Stage([device], 1) for device in range(ndevs))])


#: By the names that the command takes.
PLACEMENTS = {name: made.__func__ for name, made in vars(Placement).items() if isinstance(made, staticmethod)}


def _chain(ndevs: int) -> list[_Stage]:
    if not isinstance(ndevs, int) or ndevs < 1:
        raise ScheduleError(f"ndevs is {ndevs!r}; a placement needs 1 device or more")
    return [_Stage([device]) for device in range(ndevs)]


def _shared(ndevs: int) -> _Stage:
    return _Stage(range(ndevs), 1, 0)


def _there_and_back(ndevs: int, train: bool, *chains: Sequence[_Stage], meeting: _Stage | None = None) -> SchedPlan:
    """Each chain forward and then backward, all of them through `meeting` in between."""
    schedule = SchedPlan(ndevs)
    middle = [] if meeting is None else _blocks([meeting], train)
    for chain in chains:
        blocks = _blocks(chain, train)
        half = len(chain)
        pairs = [*blocks[:half], *middle, *blocks[half:]]
        schedule.add_block_seq([block for block, _ in pairs], [devices for _, devices in pairs])
    return schedule


def _blocks(chain: Sequence[_Stage], train: bool) -> list[tuple[Block, Sequence[int]]]:
    memory = int(train)
    blocks = [(Block(0, 1, stage.memory * memory, "forward"), stage.devices) for stage in chain]
    if train:
        back = [stage for stage in reversed(chain) if stage.backward]
        blocks += [(Block(0, stage.backward, -stage.memory, "backward"), stage.devices) for stage in back]
    return blocks

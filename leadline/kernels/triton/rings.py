"""Rings of stages in shared memory, handed from one warpgroup to another (Hopper, Gluon).

A stage has two barriers: it is ``full`` when whoever fills it arrived, and ``empty`` when all who
use it did. Turns count the stages handed over since a program's start; everyone counts them alike.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """A barrier for each stage of a ring, passed when so many warpgroups arrived."""
    array = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(array.index(i), count=ARRIVALS)
    return array


@gluon.jit
def wait_full(full, turn):
    """Until the ring's stage of this turn is filled."""
    stages: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(turn % stages), (turn // stages) & 1)


@gluon.jit
def wait_empty(empty, turn):
    """Until the ring's stage of this turn was used up; at once in the first round."""
    stages: gl.constexpr = empty.shape[0]
    mbarrier.wait(empty.index(turn % stages), ((turn // stages) & 1) ^ 1)


@gluon.jit
def arrive(array, turn):
    """This warpgroup has filled, or used up, the stage of a turn."""
    mbarrier.arrive(array.index(turn % array.shape[0]))

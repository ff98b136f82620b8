"""Deaths of cells in the simulated world, and what they undo.

Enters: a world and a cell. Leaves: the cell dead, its live rollouts elsewhere, its share of the open step's gradient
back in the queue; later the cell again, in rollout, with its next death planned.
"""

from typing import TYPE_CHECKING

from gyre_core.scheduler.cell import CellState
from gyre_core.sim.parts import Cell

if TYPE_CHECKING:
    from gyre_core.sim.world import World


def plan_failure(world: "World", cell: Cell) -> None:
    """The cell dies after a time that is drawn for its nodes."""
    mean_s = world.costs.mtbf_node_s / world.scenario.cluster.nodes_per_cell
    world.at(float(world.rng.exponential(mean_s)), _fail, world, cell)


def _fail(world: "World", cell: Cell) -> None:
    if cell.state is CellState.DEAD:
        return
    world.accounts.deaths += 1
    cell.epoch += 1
    cell.server.pause(world.now_s, False)
    if cell.index == 0:
        world.optimizing = False
    elif world.optimizing:  # the core has added its gradient already: it is lost with the core alone
        world.cells[0].done += cell.done
        cell.done = []
    lost = [*cell.done, *([cell.task] if cell.task else [])]
    for item in cell.done:
        if item.group.micro_left == 0:
            world.left += 1
        item.group.micro_left += 1
    cell.done, cell.task, cell.leaves = [], None, False
    world.micro.extendleft(reversed(lost))
    cell.state = CellState.DEAD
    world.relocate(cell)
    world.mark(cell, "dead")
    world.at(world.costs.restart_s, _restarted, world, cell)
    world.changed = True


def _restarted(world: "World", cell: Cell) -> None:
    cell.epoch += 1
    cell.state = CellState.ROLLOUT
    cell.load_free_s = world.now_s
    world.mark(cell, "no rollouts")
    world.admit()
    plan_failure(world, cell)
    world.changed = True

"""What holds whatever a policy says: the plan that may be applied, how far dispatch runs ahead, what is too old.

Enters: a snapshot and a policy's plan. Leaves: the same plan with at most one move, every other move turned into a
refusal with its reason. Pure, as the policies are.

Invariants: moves are serial, but for all cells of a role together; the core is first into training and last out; a cell
leaves rollout only when the slots that stay hold every rollout that an engine serves now; the last cell does not leave
training with work pending.
"""

from dataclasses import replace

from gyre_core.scheduler.cell import CellState
from gyre_core.scheduler.policy import Move, Plan, Snapshot


def enforce(snapshot: Snapshot, plan: Plan) -> Plan:
    """The plan with its first permitted move; the others become refusals.

    A plan for all cells of a role `together` keeps all its moves, or is taken as a plan of single moves.
    """
    if not plan.moves:
        return plan
    if plan.together and _whole_role(snapshot, plan):
        return plan
    allowed: list[Move] = []
    refusals = list(plan.refusals)
    for move in plan.moves:
        reason = "moves are serial: one a plan" if allowed else refusal(snapshot, move)
        if reason is None:
            allowed.append(move)
        else:
            refusals.append(replace(move, reason=reason))
    return replace(plan, moves=tuple(allowed), refusals=tuple(refusals))


def _whole_role(snapshot: Snapshot, plan: Plan) -> bool:
    """Whether the plan moves every cell of one role, nothing is under way, and training has nothing left to do."""
    if any(cell.state in {CellState.DRAINING, CellState.RETURNING} for cell in snapshot.cells):
        return False
    targets = {move.to for move in plan.moves}
    moved = {move.cell_id for move in plan.moves}
    if targets == {"train"}:
        core_first = snapshot.cells[0].state in {CellState.ROLLOUT, CellState.TRAINING}
        return core_first and moved == {cell.cell_id for cell in snapshot.serving}
    if targets == {"rollout"}:
        return snapshot.pending_microsteps == 0 and moved == {cell.cell_id for cell in snapshot.training}
    return False


def refusal(snapshot: Snapshot, move: Move) -> str | None:
    """Why the move may not be made now; None when it may."""
    cells = {cell.cell_id: cell for cell in snapshot.cells}
    cell = cells.get(move.cell_id)
    if cell is None:
        return f"there is no cell {move.cell_id}"
    expected = CellState.ROLLOUT if move.to == "train" else CellState.TRAINING
    if cell.state is not expected:
        return f"{cell.cell_id} is {cell.state}, not {expected}"
    for other in snapshot.cells:
        if other.state in {CellState.DRAINING, CellState.RETURNING}:
            return f"moves are serial: {other.cell_id} is {other.state}"
    core = snapshot.cells[0]
    if move.to == "train":
        if cell is not core and core.state is not CellState.TRAINING:
            return f"core first: {core.cell_id} is {core.state}"
        room = snapshot.capacity - cell.slots
        if snapshot.residents > room:
            return f"{snapshot.residents} live rollouts do not fit into the {room} slots that stay"
        return None
    if cell is core and len(snapshot.training) > 1:
        return f"core last: {len(snapshot.training) - 1} satellites still train"
    if cell is core and snapshot.pending_microsteps > 0:
        return f"core last: {snapshot.pending_microsteps} micro-steps are pending"
    return None


def dispatch_depth(*, phi: int, mu: int, batch_groups: int) -> int:
    """Q: groups that may be dispatched and untrained at a boundary. Raises ValueError for a depth of nothing."""
    if phi < 0 or mu < 1 or batch_groups < 1:
        raise ValueError(f"phi {phi}, mu {mu}, batch_groups {batch_groups}: phi >= 0 and the others >= 1 are needed")
    return (phi + mu) * batch_groups


def stale_reason(*, dispatched_version: int, training_version: int, staleness: int) -> str | None:
    """Why a group is too old to be trained; None when it is within the bound."""
    age = training_version - dispatched_version
    return f"stale: {age} versions old, the bound is {staleness}" if age > staleness else None

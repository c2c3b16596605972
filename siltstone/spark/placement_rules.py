"""Decide on which executor each subtask runs: balanced, with as few moves as possible."""

from collections.abc import Mapping, Sequence


def assign_subtasks(current: Sequence[str | None], cores: Mapping[str, int]) -> list[str]:
    """Assign subtasks to executors so that their number per core differs by at most one.

    Of all such assignments it is one that moves the fewest subtasks.

    Args:
        current: per subtask, the executor that has its state; None if none has.
        cores: executor -> its cores, at least one. No executors: nothing can be assigned.

    Returns:
        Per subtask, its executor; empty if there are no executors.
    """
    if not cores:
        return []
    least, further = divmod(len(current), sum(cores.values()))
    # Each core gets `least` subtasks, and `further` cores get one more.
    quota = {executor: least * cores[executor] for executor in cores}
    held = {executor: sum(each == executor for each in current) for executor in cores}
    for executor in sorted(cores, key=lambda e: (quota[e] - held[e], e)):
        more = max(min(held[executor] - quota[executor], cores[executor], further), 0)
        quota[executor] += more
        further -= more
    while further:
        executor = min((e for e in cores if quota[e] < (least + 1) * cores[e]), key=lambda e: (quota[e] / cores[e], e))
        quota[executor] += 1
        further -= 1
    assigned: list[str | None] = []
    for each in current:
        keeps = each is not None and quota.get(each, 0) > 0
        assigned.append(each if keeps else None)
        if each is not None and keeps:
            quota[each] -= 1
    free = (executor for executor in sorted(cores) for _ in range(quota[executor]))
    return [next(free) if each is None else each for each in assigned]

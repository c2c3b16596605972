"""Hosts that share store, catalog and sinks: one is killed before it acknowledges, another delivers what it left."""

from tests.fault.lines import Within
from tests.fault.rounds import Round, Rounds

LOST = 0.3
"""a share of the attempts at tasks whose acknowledgements do not arrive"""
COMPLETE = Within("run/region.py", "ConsistentRegion.complete", 500)
ACKNOWLEDGING = [
    Within("run/subtask.py", "run_subtask", 3000),
    Within("run/region.py", "ConsistentRegion.acknowledge"),
    COMPLETE,
    COMPLETE,
    Within("run/region.py", "ConsistentRegion._advance"),
    Within("run/outbox.py", "Outbox.deliver", 500),
]
"""between what a task commits and what is heard of it, and between a checkpoint's commit and its delivery"""


def hosts(rounds: Rounds, round: Round, kind: str) -> None:
    """Runs on one host after the other, their tasks on any, some of whose acknowledgements are lost.

    The first is killed, the next on another host delivers what it left, and one goes on from working state that is old.
    """
    chance, all_ = rounds.chance, rounds.site.hosts
    known = rounds.some()
    round.kinds = ("run",)
    first, other = chance.sample(all_, 2)
    losing = {"hosts": all_, "lost": LOST, "seed": chance.randrange(1 << 30)}
    within = chance.choice(ACKNOWLEDGING)
    line = rounds.some_line("run", within)
    victim = rounds.start("run", known, first, at_line=line, within=within, **losing)
    end = rounds.judge(round, victim, alone=True, anywhere=True)
    rounds.learn("run", end.code == -9, None, within)
    round.kills["run"] += end.code == -9
    round.outcomes.append(f"(in {within})")
    for host in (other, first)[: chance.choice([1, 2])]:
        here = rounds.known(known.stream)
        rounds.judge(round, rounds.start("run", here, host, **losing), alone=True, anywhere=True)
        round.violations += rounds.check()

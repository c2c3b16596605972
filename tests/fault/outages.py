"""A catalog that goes away while a command is amid one of its calls: the command goes on once it is back.

Of a server, connections are cut and refused, answers lost, requests delayed; a file is locked by somebody else.
"""

import math
import sqlite3
import time
from contextlib import closing
from random import Random
from signal import SIGCONT, SIGSTOP

from tests.fault.forked import Victim
from tests.fault.lines import Within
from tests.fault.rounds import Round, Rounds
from tests.fault.sites import catalog_proxy
from tests.proxy import LOST_ANSWER, Fault, Proxy

CALL = Within("catalog/database/transactions.py", "Outages.call", 1200)
"""each call of an open catalog; one that is away when it is opened is an error at once"""
SHORTEST_S, LONGEST_S = 0.1, 30.0
STALL_S = 10.0
"""after which a session that is idle in a transaction is far from being ended"""
COMMIT = rb"COMMIT(?!TED)"


def outage(rounds: Rounds, round: Round, kind: str) -> None:
    """A command is stopped at a line amid a call of the catalog; the catalog goes away; the command goes on, and ends
    as if nothing had been."""
    known, served = rounds.some(), rounds.site.catalog == "postgresql"
    catalog = None
    if served:
        catalog_proxy().clear()
        catalog = rounds.site.behind(catalog_proxy())
    line = rounds.some_line(kind, CALL)
    victim = rounds.start(kind, known, catalog=catalog, at_line=line, signal=SIGSTOP, within=CALL)
    met = victim.until(lambda: victim.stopped)
    rounds.learn(kind, met, None, CALL)
    if met:
        round.faults[kind] += 1
        happened = _away(catalog_proxy(), victim, rounds.chance) if served else _held(rounds, victim)
        round.outcomes.append(f"(the catalog: {happened})")
    rounds.judge(round, victim, alone=True)
    if served:
        catalog_proxy().clear()


def _held(rounds: Rounds, victim: Victim) -> str:
    """Let the victim wait for the lock of a catalog in a file; says for how long."""
    seconds = _some_seconds(rounds.chance)
    with closing(sqlite3.connect(rounds.site.catalog_path, timeout=0.01, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:  # the victim itself has it
            victim.signal(SIGCONT)
            return "in use"
        victim.signal(SIGCONT)
        _wait(victim, seconds)
        connection.execute("ROLLBACK")
    return f"held for {seconds:.1f} s"


def _some_seconds(chance: Random) -> float:
    """Most are short: as many between 0.1 s and 1 s as between 1 s and 10 s."""
    return math.exp(chance.uniform(math.log(SHORTEST_S), math.log(LONGEST_S)))


def _wait(victim: Victim, seconds: float) -> None:
    """So long, unless the victim ends before."""
    ends = time.monotonic() + seconds
    victim.until(lambda: time.monotonic() >= ends)


def _away(proxy: Proxy, victim: Victim, chance: Random) -> str:
    """Let the catalog be away, wake the victim up, let the catalog come back; says what it was."""
    seconds = _some_seconds(chance)
    what = chance.choice(["away", "away", "an answer to COMMIT lost", "an answer to COMMIT lost, then away", "a stall"])
    if what == "away":
        proxy.down()
    elif what == "a stall":
        seconds = min(seconds, STALL_S)
        proxy.next(Fault(delay_s=seconds))
    else:
        proxy.next(LOST_ANSWER, holding=COMMIT)
    victim.signal(SIGCONT)
    if what.endswith("away"):
        if what != "away" and victim.until(lambda: proxy.met > 0):
            proxy.down()
        _wait(victim, seconds)
        proxy.up()
        return f"{what}, {seconds:.1f} s"
    return what

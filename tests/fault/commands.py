"""Commands of every kind for the campaign to hurt, and how each of them may end."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.fault.held_stream import HELD
from tests.fault.processes import End

NAME = HELD.name
NOTHING_YET = "no (warehouse|catalog|stream|checkpoint|latest)"
KEPT = "is its newest|is kept by its savepoint"


@dataclass
class Known:
    """What is known of one stream when a command is chosen: visible checkpoints, the steps still to do, and the
    directory below which savepoints are exported."""

    stream: str
    checkpoints: list[int]
    left: int
    savepoints: list[str] = field(default_factory=list)
    exports: Path = Path()

    @property
    def newest(self) -> int:
        """The newest checkpoint, 0 before the first."""
        return max(self.checkpoints, default=0)


Arguments = Sequence[object]


def _run(chance: Random, known: Known) -> Arguments:
    parallelism, steps = chance.choice([1, 2, 3]), chance.choice([1, 1, 2, 3])
    policy = chance.choice(["marginal-cost", "adjust-d", "files"])
    backend = "rocksdb" if policy == "files" else chance.choice(["heap", "heap", "rocksdb"])
    return (
        *("--batches", min(known.left, chance.choice([1, 2, 2, 3]))),
        *("--parallelism", parallelism, "--checkpoint-steps", steps, "--policy", policy),
        *("--backend", backend),
        *("--max-pending", chance.choice([0, 1, 2])),
    )


def _some(chance: Random, known: Known) -> int:
    return chance.choice(known.checkpoints or [1])


def _materialize(chance: Random, known: Known) -> Arguments:
    return ("--at", chance.choice(["latest", "latest", _some(chance, known)]))


def _truncate(chance: Random, _: Known) -> Arguments:
    return ("--keep-last", chance.choice([1, 2, 3, 5]))


def _delete(chance: Random, known: Known) -> Arguments:
    return chance.sample(known.checkpoints[:-1] or [1], min(len(known.checkpoints[:-1]) or 1, chance.choice([1, 2, 4])))


def _sweep(chance: Random, _: Known) -> Arguments:
    return (*chance.choice([(), (), ("--incomplete",)]), *chance.choice([(), (), ("--limit", 3)]))


def _savepoint(chance: Random, known: Known) -> Arguments:
    if known.savepoints and chance.random() < 0.5:
        return (chance.choice(known.savepoints), "--drop")
    full = chance.choice([(), ("--full",)])
    return (f"s{chance.randrange(10**6)}", "--at", _some(chance, known), *full)


def _export(chance: Random, known: Known) -> Arguments:
    # Often to where an earlier one may have been killed.
    name = chance.choice(known.savepoints or ["none"])
    return (name, "--to", known.exports / f"{known.stream}-{name}")


def _import(chance: Random, known: Known) -> Arguments:
    there = sorted(known.exports.glob("*"))
    # Two of the same name sometimes.
    return (chance.choice(there or [known.exports / "none"]), "--as", f"import{chance.randrange(4)}")


def _optimize(chance: Random, _: Known) -> Arguments:
    return chance.choice([(), (), (), ("--dry-run",)])


def _verify(chance: Random, known: Known) -> Arguments:
    return chance.choice([("--all",), ("--at", _some(chance, known))])


def _restore(chance: Random, known: Known) -> Arguments:
    return ("--at", _some(chance, known), "--parallelism", chance.choice([1, 2, 3]))


def _fork(chance: Random, known: Known) -> Arguments:
    # Two of the same name sometimes; few of them, since each is a stream to look after.
    return (f"fork{chance.randrange(2)}", "--at", _some(chance, known))


def _rescale(chance: Random, _: Known) -> Arguments:
    return ("--parallelism", chance.choice([1, 2, 3, 4]))


def _nothing(_: Random, __: Known) -> Arguments:
    return ()


@dataclass(frozen=True)
class Command:
    """One kind.

    Attributes:
        arguments: chosen at random.
        refusals: (exit code, what it says) that are right when others are, or were, at work on the stream.
        weight: how often it is chosen, beside others.
        of_stream: whether it is one of a stream, whose name is its first argument.
        elsewhere: whether it works on another warehouse, of which the stream's runs know nothing.
    """

    arguments: Callable[[Random, Known], Arguments]
    refusals: Sequence[tuple[int, str]] = ()
    weight: int = 1
    of_stream: bool = True
    elsewhere: bool = False


GONE = (2, "no (latest )?checkpoint")
OVERTAKEN = (4, "fenced")
LOSS = (2, "--accept-loss")
COPIED = (2, "already has a snapshot|has a reference copy already")
OTHERS_MERGED = (1, "concurrent|conflict")
COMMANDS = {
    "run": Command(_run, [OVERTAKEN], 4),
    "materialize": Command(_materialize, [GONE, (2, "is being materialized"), (4, "lost its lease")], 4),
    "truncate": Command(_truncate, [OVERTAKEN, (2, KEPT)], 2),
    "delete": Command(_delete, [OVERTAKEN, GONE, (2, KEPT)]),
    "sweep": Command(_sweep, weight=2),
    "savepoint": Command(
        _savepoint,
        [OVERTAKEN, GONE, (2, "no savepoint|has a savepoint|is being materialized"), (4, "lost its lease")],
    ),
    "export-savepoint": Command(
        _export, [GONE, (2, "no savepoint|still reads deltas|files of RocksDB|has not reached its sink")], 2
    ),
    "import-savepoint": Command(_import, [OVERTAKEN, (2, "no exported savepoint|exists here already")], 2, False, True),
    "optimize": Command(_optimize, [OTHERS_MERGED], 2),
    "upgrade": Command(_nothing, of_stream=False),
    "fork": Command(_fork, [GONE, (2, "exists already")]),
    "snapshot": Command(_nothing, [OVERTAKEN, GONE, COPIED, (1, "live state|working state")]),
    "recover": Command(_nothing, [OVERTAKEN, GONE, LOSS]),
    "rescale": Command(_rescale, [OVERTAKEN, GONE, (2, "logged steps must be run again first")], 2),
    "verify": Command(_verify, [GONE]),
    "restore": Command(_restore, [GONE]),
}


def choose(chance: Random, kinds: Sequence[str], known: Known) -> str:
    """One of the kinds, by weight; while there is nothing yet, most often a run."""
    if not known.checkpoints and "run" in kinds and chance.random() < 0.7:
        return "run"
    return chance.choices(kinds, [COMMANDS[kind].weight for kind in kinds])[0]


def wrong(kind: str, end: End, *, alone: bool, faulty: bool, begun: bool, anywhere: bool = False) -> str | None:
    """Why a command may not have ended so; None if it may.

    Args:
        alone: nobody else was at work.
        faulty: the store or the disk was not what it should be.
        begun: the stream has a checkpoint.
        anywhere: its tasks ran on any host, which no placement lets them. Then there is nothing to go on from
            if a checkpoint is pending in form `files`; with Spark the run resets itself.
    """
    if end.code in (0, -9):
        return None
    if kind == "verify" and faulty and end.code == 1:  # its result, not an error: it has found what is damaged
        return None
    said = end.error
    told = f"{kind} ended with {end.code}: {end.said[-1500:] or 'nothing said'}"
    if not said or "Traceback" in end.said:
        return told
    refusals = list(COMMANDS[kind].refusals)
    if alone:  # what a killed one has not released lives on until it expires; what is asked for may be impossible
        refusals = [(code, text) for code, text in refusals if code in (1, 2)]
    if not begun:
        refusals.append((2, NOTHING_YET))
    if anywhere:
        refusals.append((1, "have to be processed again"))
    if faulty:
        refusals += [LOSS, (3, ""), (1, "object|checksum|corrupt|digest|answer")]
    return None if any(code == end.code and re.search(text, said) for code, text in refusals) else told

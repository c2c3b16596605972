"""Read stacks that py-spy sampled, sum them up by phase of a step, and draw each phase as a flame graph."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from benchmarks.goals import table_of

Stack = tuple[str, ...]
"""frames as `Class.function (file:line)`, the outermost first"""
Samples = Mapping[Stack, int]
"""stack -> how many samples have it"""


class Phase(NamedTuple):
    """What happens below one of Siltstone's functions; `file` is the end of its path, or a directory of it."""

    name: str
    process: str
    function: str
    file: str


DRIVER, WORKERS = "driver", "Python workers, all subtasks"
PHASES = (
    Phase("begin the step", DRIVER, "begin_step", "siltstone/run/region.py"),
    Phase("make its frame", DRIVER, "step_frame", "siltstone/spark/step.py"),
    Phase("run its job", DRIVER, "answers", "siltstone/spark/step.py"),
    Phase("take the acknowledgements", DRIVER, "_acknowledge", "siltstone/spark/runner.py"),
    Phase("prepare the checkpoint", DRIVER, "_prepare", "siltstone/spark/runner.py"),
    Phase("store it", DRIVER, "store", "siltstone/run/region.py"),
    Phase("commit", DRIVER, "commit", "siltstone/run/region.py"),
    Phase("deliver", DRIVER, "_deliver", "siltstone/spark/runner.py"),
    Phase("open working state", WORKERS, "working_state", "siltstone/run/working_state.py"),
    Phase("process rows", WORKERS, "output", "siltstone/run/processing.py"),
    Phase("write the changes", WORKERS, "write_part", "siltstone/run/persist.py"),
    Phase("commit working state", WORKERS, "commit", "siltstone/state/"),
)
_LETTERS, _FEWEST_LETTERS = 180, 5
"""letters of a name that the whole width has room for, and fewer than which say nothing"""


def read_stacks(path: Path) -> Counter[Stack]:
    """Read py-spy's raw format: a line per stack, its frames separated by semicolons, then the number of samples."""
    found = Counter[Stack]()
    for line in path.read_text().splitlines():
        frames, _, count = line.rpartition(" ")
        found[tuple(frames.split(";"))] += int(count)
    return found


def by_phase(samples: Samples, phases: Iterable[Phase] = PHASES) -> dict[Phase, Counter[Stack]]:
    """Give each sample to the first of its frames that begins a phase, and cut the frames before that one off."""
    found = {phase: Counter[Stack]() for phase in phases}
    for stack, count in samples.items():
        for depth, frame in enumerate(stack):
            phase = next((phase for phase in found if _begins(phase, frame)), None)
            if phase is not None:
                found[phase][stack[depth:]] += count
                break
    return found


def _begins(phase: Phase, frame: str) -> bool:
    function, _, place = frame.partition(" (")
    return function.rpartition(".")[2] == phase.function and phase.file in place


def boxes(samples: Samples) -> Iterator[tuple[str, int, int, int]]:
    """Lay out a flame graph: yield (function, its depth, samples to its left, samples that have it) of each box.

    Lines of a function count as one. Callees follow in order of their names, each above its caller.
    """
    stacks = sorted((tuple(map(_without_line, stack)), count) for stack, count in samples.items())
    yield from _boxes(stacks, 0, 0)


def _without_line(frame: str) -> str:
    function, _, place = frame.partition(" (")
    return f"{function} ({place.partition(':')[0].rpartition('/')[2]})"


def _boxes(stacks: list[tuple[Stack, int]], depth: int, left: int) -> Iterator[tuple[str, int, int, int]]:
    for name in dict.fromkeys(stack[depth] for stack, _ in stacks if len(stack) > depth):
        above = [(stack, count) for stack, count in stacks if len(stack) > depth and stack[depth] == name]
        width = sum(count for _, count in above)
        yield name, depth, left, width
        yield from _boxes(above, depth + 1, left)
        left += width


def milliseconds(samples: Samples, rate: int, steps: int) -> float:
    """Return the milliseconds per step that samples stand for."""
    return 1000 * sum(samples.values()) / rate / steps


def phase_table(phases: Mapping[Phase, Samples], rate: int, steps: int, title: str) -> Table:
    """Make a table of the milliseconds per step of each phase."""
    table = table_of(title, "process", "phase", "ms", left=2)
    for phase, samples in phases.items():
        table.add_row(phase.process, phase.name, f"{milliseconds(samples, rate, steps):.1f}")
    return table


def draw(phases: Mapping[Phase, Samples], rate: int, steps: int, path: Path, title: str) -> None:
    """Draw a flame graph per phase, as wide as the time it takes; PNG or SVG, by the path's name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = {phase: list(boxes(samples)) for phase, samples in phases.items() if samples}
    figure, all_axes = pyplot.subplots(
        len(drawn), 1, figsize=(16, 3.2 * len(drawn)), layout="constrained", squeeze=False
    )
    colours = pyplot.get_cmap("YlOrRd")
    for axes, (phase, found) in zip(all_axes[:, 0], drawn.items(), strict=True):
        whole = milliseconds(phases[phase], rate, steps)
        scale = 1000 / rate / steps
        for name, depth, left, width in found:
            colour = colours(0.1 + 0.4 * (hash_of(name) % 100) / 100)
            axes.barh(depth, width * scale, left=left * scale, height=1, color=colour, edgecolor="white", linewidth=0.5)
            letters = int(_LETTERS * width * scale / whole)
            if letters >= _FEWEST_LETTERS:
                axes.text(left * scale, depth, f" {name[:letters]}", va="center", fontsize=7)
        axes.set_xlim(0, whole)
        axes.set_yticks([])
        axes.set_title(f"{phase.process}: {phase.name}, {whole:.1f} ms", loc="left", fontsize=10)
    figure.suptitle(title)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def hash_of(name: str) -> int:
    """Return a number that is the same in each process, for a function's colour."""
    return sum(map(ord, name))

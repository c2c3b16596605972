"""Compare the checkpoint policies with the optimum in hindsight, over many traces: `make bench-policy`.

    python -m benchmarks.policy [--seeds N] [--checkpoints N] [--picture PATH] [--json]

A trace is, for each checkpoint, the size of a base and of a delta. A schedule costs, per checkpoint, the
bytes it writes (a delta grown by the logging ratio) plus lambda times what a restore of that checkpoint would
read. The optimum is found by dynamic programming over the whole trace, under the same bounds (deltas in a
chain, bytes of deltas per byte of base, bytes of the chain per byte of live state) that the policies keep.
The policies are the production classes. They decide before the interval begins, and learn a delta's size only if
changes were tracked. As in production, a writer whose delta exceeds `delta_limit_bytes` writes a base instead, and the
logging still counts.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.goals import Goal, goals_table
from siltstone.chains.policies import (
    DEFAULT_POLICY,
    AdjustD,
    CheckpointCost,
    Decision,
    MarginalCost,
    Policy,
    PolicyOptions,
    PolicyState,
)
from siltstone.model import Form

LAMBDAS = (0.0, 0.01, 0.05, 0.2)
_BASE = 100_000_000.0
_ROW_BYTES = 50


@dataclass(frozen=True)
class Trace:
    """Bytes of a base and of a delta at each checkpoint (float64[n] each)."""

    base: np.ndarray
    delta: np.ndarray


def _regimes(rng: np.random.Generator, n: int, stay: float, begin: float) -> np.ndarray:
    """bool[n]: a two-state Markov chain, off at first."""
    on = np.zeros(n, bool)
    for i in range(1, n):
        on[i] = rng.random() < (stay if on[i - 1] else begin)
    return on


def traces(seed: int, n: int) -> dict[str, Trace]:
    """Make seven usual traces, two harder ones, and six that a forecast from the last delta gets wrong.

    Small noise is log-normal. The eighth and ninth have two regimes. "turning": 1 % changes, or everything, for 100
    checkpoints on average. "whole bursts": bursts of 5 checkpoints on average in which about the whole state changes,
    so that a policy that does not know the future must lose much. Dynamic programming that knows the law of the trace
    but not its future costs 1.10 (lambda = 0.2) to 1.18 (lambda = 0) times the optimum, if it decides on a delta
    before its size is known. Of the last six, "alternating" has a large delta after each small one, "periodic" one in
    every 2 to 12, "shrinking" a state that becomes a fiftieth, "heavy tail" deltas after Pareto's law (1.2),
    "switching" levels of 1 %, 8 % and 45 % for 60 checkpoints on average, and "random walk" a delta whose logarithm
    wanders.
    """
    rng = np.random.default_rng(seed)

    def noise(sigma: float) -> np.ndarray:
        return np.exp(rng.normal(-sigma * sigma / 2, sigma, n))

    flat = np.full(n, _BASE)
    day = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(n) / 96)
    growing = _BASE * np.linspace(0.02, 1, n)
    window = flat * noise(0.05)
    half_bursts = np.where(_regimes(rng, n, 0.8, 0.03), rng.uniform(0.3, 0.7, n), 0.01 * noise(0.1))
    turning = np.where(_regimes(rng, n, 0.99, 0.01), 1.05, 0.01) * noise(0.05)
    whole_bursts = np.where(_regimes(rng, n, 0.8, 0.03), rng.uniform(0.8, 1.2, n), 0.01 * noise(0.1))
    large, period = rng.uniform(0.3, 0.9), int(rng.integers(2, 13))
    alternating = np.where(np.arange(n) % 2, large, 0.01) * noise(0.1)
    periodic = np.where(np.arange(n) % period, 0.01, rng.uniform(0.2, 0.8)) * noise(0.1)
    shrinking = _BASE * np.geomspace(1, 0.02, n)
    pareto = np.minimum(1.1, 0.01 * (1 + rng.pareto(1.2, n)))
    levels = np.array([0.01, 0.08, 0.45])[np.cumsum(rng.random(n) < 1 / 60) * int(rng.integers(1, 3)) % 3]
    walk = np.clip(np.exp(np.log(0.05) + np.cumsum(rng.normal(0, 0.15, n))), 0.001, 1.1)
    return {
        "steady small": Trace(flat, flat * 0.01 * noise(0.1)),
        "steady large": Trace(flat, flat * 0.6 * noise(0.1)),
        "bursts": Trace(flat, flat * half_bursts),
        "growing": Trace(growing, np.minimum(growing, 0.02 * _BASE * noise(0.1))),
        "whole window": Trace(window, window * rng.uniform(1.0, 1.1, n)),
        "log-normal": Trace(flat, flat * np.minimum(1.1, 0.05 * noise(1.0))),
        "daily wave": Trace(flat, flat * (0.01 + 0.4 * day**2) * noise(0.1)),
        "turning": Trace(flat, flat * turning),
        "whole bursts": Trace(flat, flat * whole_bursts),
        "alternating": Trace(flat, flat * alternating),
        "periodic": Trace(flat, flat * periodic),
        "shrinking": Trace(shrinking, shrinking * 0.05 * noise(0.3)),
        "heavy tail": Trace(flat, flat * pareto),
        "switching": Trace(flat, flat * levels * noise(0.1)),
        "random walk": Trace(flat, flat * walk),
    }


def optimum(trace: Trace, options: PolicyOptions) -> float:
    """Compute the least cost of any schedule within the bounds, with the whole trace known, in O(n d_max)."""
    n = len(trace.base)
    grown, weight = 1 + options.logging_ratio, options.restore_weight
    ratio = np.inf if options.size_ratio_max is None else options.size_ratio_max
    cap = np.inf if options.space_amplification_max is None else options.space_amplification_max
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    for i, base in enumerate(trace.base):
        deltas = trace.delta[i + 1 : i + 1 + options.d_max]
        sums = np.cumsum(deltas)
        live = trace.base[i + 1 : i + 1 + options.d_max]
        fits = np.logical_and.accumulate((sums <= ratio * base) & (base + sums <= cap * live))
        deltas, sums = deltas[fits], sums[fits]
        costs = np.concatenate([[base * (1 + weight)], grown * deltas + weight * (base + sums)])
        ends = slice(i + 1, i + 1 + len(costs))
        best[ends] = np.minimum(best[ends], best[i] + np.cumsum(costs))
    return float(best[n])


def run(trace: Trace, policy: Policy) -> float:
    """Compute the cost of `policy` over the trace."""
    options = policy.options
    state = policy.start()
    total = chain = 0.0
    for base, delta in zip(trace.base.tolist(), trace.delta.tolist(), strict=True):
        decision = policy.decide(state)
        limit = decision.delta_limit_bytes
        wants_delta = decision.form is Form.DELTA
        too_large = wants_delta and limit is not None and delta > limit
        form = Form.DELTA if wants_delta and not too_large else Form.BASE
        written = delta if form is Form.DELTA else base
        chain = chain + delta if form is Form.DELTA else base
        logged = options.logging_ratio * delta if decision.tracking else 0.0
        total += written + logged + options.restore_weight * chain
        cost = CheckpointCost(
            form=form,
            bytes=int(written),
            seconds=written / 1e8,
            rows=int(base / _ROW_BYTES),
            tracked_bytes=int(delta) if too_large else None,
        )
        state = policy.observe(state, cost)
    return total


class FixedD(AdjustD):
    """A policy with a fixed number of deltas; 0 is always-base. It keeps the bounds, like all policies."""

    def observe(self, state: PolicyState, cost: CheckpointCost) -> PolicyState:
        return replace(super().observe(state, cost), d=self.options.d0)

    def decide(self, state: PolicyState) -> Decision:
        if self.options.d0 == 0:
            return Decision(form=Form.BASE, tracking=False, d=0, reason="always a base")
        return super().decide(state)


POLICIES: dict[str, Callable[[PolicyOptions], Policy]] = {
    "marginal-cost": MarginalCost,
    "adjust-d, doubling": lambda o: AdjustD(o.model_copy(update={"step": "double"})),
    "adjust-d, D + 1": lambda o: AdjustD(o.model_copy(update={"step": "one"})),
    "fixed 10 deltas": lambda o: FixedD(o.model_copy(update={"d0": 10})),
    "always base": lambda o: FixedD(o.model_copy(update={"d0": 0})),
}


def measure(
    seeds: int, n: int, policies: Mapping[str, Callable[[PolicyOptions], Policy]] = POLICIES
) -> tuple[list[str], dict[str, np.ndarray]]:
    """Measure on odd seeds, since the policies are tuned on even ones.

    Returns:
        The trace names, and policy -> float64[trace, lambda, seed]: cost as a multiple of the optimum's.
    """
    names = list(traces(0, 2))
    ratios = {policy: np.empty((len(names), len(LAMBDAS), seeds)) for policy in policies}
    console = Console(stderr=True)
    for at, seed in enumerate(
        track(range(1, 2 * seeds, 2), "seeds", console=console, disable=not console.is_terminal, transient=True)
    ):
        for i, trace in enumerate(traces(seed, n).values()):
            for j, weight in enumerate(LAMBDAS):
                options = PolicyOptions(restore_weight=weight)
                least = optimum(trace, options)
                for policy, make in policies.items():
                    ratios[policy][i, j, at] = run(trace, make(options)) / least
    return names, ratios


def table(names: list[str], ratios: dict[str, np.ndarray]) -> Table:
    """Make a table of the averages and worst runs of each policy, in total and per trace."""
    out = Table(title="cost as a multiple of the optimum in hindsight: average (worst run)")
    out.add_column("trace")
    for policy in ratios:
        out.add_column(policy, justify="right")

    def row(label: str, pick: Callable[[np.ndarray], np.ndarray], **style: bool) -> None:
        cells = [f"{pick(r).mean():.3f} ({pick(r).max():.2f})" for r in ratios.values()]
        out.add_row(label, *cells, end_section=style.get("last", False))

    for i, name in enumerate(names):
        row(name, lambda r, i=i: r[i], last=i in (6, 8, len(names) - 1))
    for j, weight in enumerate(LAMBDAS):
        row(f"lambda {weight:g}", lambda r, j=j: r[:, j], last=j == len(LAMBDAS) - 1)
    row("the first seven", lambda r: r[:7])
    row("the last six", lambda r: r[9:])
    row("these thirteen", lambda r: np.concatenate([r[:7], r[9:]]))
    row("all", lambda r: r)
    for what, worst in (("worst trace", (1, 2)), ("worst trace and lambda", 2)):
        cells = [f"{r[:7].mean(axis=worst).max():.3f} / {r[9:].mean(axis=worst).max():.3f}" for r in ratios.values()]
        out.add_row(f"{what}, seven / six", *cells)
    return out


def goals(ratios: np.ndarray) -> list[Goal]:
    """Return the goals of the default policy, over the first seven traces and the last six.

    Args:
        ratios: its costs, float64[trace, lambda, seed].
    """
    found = np.concatenate([ratios[:7], ratios[9:]])
    return [
        Goal("marginal-cost / optimum in hindsight, average", float(found.mean()), at_most=1.03),
        Goal(
            "marginal-cost / optimum in hindsight, worst trace and lambda",
            float(found.mean(axis=2).max()),
            at_most=1.12,
        ),
    ]


def picture(names: list[str], ratios: dict[str, np.ndarray], path: Path) -> None:
    """Draw, per trace, each policy's average and its range, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(12, 5), layout="constrained")
    width = 0.8 / len(ratios)
    for k, (policy, r) in enumerate(ratios.items()):
        flat = r.reshape(len(names), -1)
        mean = flat.mean(axis=1)
        spread = np.abs(np.stack([flat.min(axis=1), flat.max(axis=1)]) - mean)
        where = np.arange(len(names)) + k * width
        axes.bar(where, mean, width, yerr=spread, capsize=2, label=policy, bottom=0)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_ylim(0.9)
    axes.set_xticks(np.arange(len(names)) + 0.4 - width / 2, names)
    axes.set_ylabel("cost / optimum in hindsight (log)")
    axes.set_title(f"Checkpoint policies, lambda in {', '.join(f'{w:g}' for w in LAMBDAS)}: mean and range")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and draw."""
    what = "Checkpoint policies against the optimum in hindsight."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policy", description=what)
    parser.add_argument("--seeds", type=int, default=10, help="traces of each kind (default 10)")
    parser.add_argument("--checkpoints", type=int, default=500, help="length of a trace (default 500)")
    parser.add_argument("--picture", type=Path, default=Path("bench-policy.png"), help="where the PNG goes")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.checkpoints < 2:
        parser.error("--seeds must be at least 1 and --checkpoints at least 2")
    names, ratios = measure(options.seeds, options.checkpoints)
    picture(names, ratios, options.picture)
    wanted = goals(ratios[DEFAULT_POLICY])
    if options.json:
        cells = {p: {n: r[i].mean(axis=1).tolist() for i, n in enumerate(names)} for p, r in ratios.items()}
        reached = {"goals": {goal.what: goal.measured for goal in wanted}}
        print(json.dumps({"lambdas": LAMBDAS, "ratios": cells, "picture": str(options.picture), **reached}))
    else:
        console = Console(width=None if sys.stdout.isatty() else 150)
        console.print(table(names, ratios))
        console.print(goals_table(wanted))
        console.print(f"picture: {options.picture}")
    return int(not all(goal.is_kept for goal in wanted))


if __name__ == "__main__":
    sys.exit(main())

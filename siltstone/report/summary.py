"""Show a report on a terminal."""

from rich import filesize
from rich.table import Table
from rich.text import Text

from siltstone.model import Form
from siltstone.report.data import CheckpointPoint, OperatorPart, ReportData

_PROOF = {True: "yes", False: Text("FAILED", "bold red"), None: "-"}


def summary_table(data: ReportData) -> Table:
    """Make a table with one row per operator and their totals: bases and deltas written, and what a restore reads."""
    count = len(data.checkpoints)
    title = f"{data.stream}: {count} checkpoint{'s' * (count != 1)}, {filesize.decimal(data.stored_bytes)} stored"
    if data.amplification:
        title += f", {data.amplification:.1f} times the newest base"
    ill = "\n".join(found.reason for found in data.materialization.values() if not found.fine)
    table = Table(title=title, title_justify="left", box=None, show_footer=True, caption=ill or None)
    table.caption_justify = "left"
    newest = data.newest
    table.add_column("operator", "all")
    table.add_column("state rows", f"{newest.record.rows:,}", justify="right")
    table.add_column("bases", justify="right")
    table.add_column("mean base", justify="right")
    table.add_column("deltas", justify="right")
    table.add_column("mean delta", justify="right")
    table.add_column("D", justify="right")
    table.add_column("restore reads", filesize.decimal(newest.chain_bytes), justify="right")
    table.add_column("at most", _size(newest.bound_bytes), justify="right")
    table.add_column("amplified", justify="right")
    table.add_column("restore s", _describe_measured(data), justify="right")
    table.add_column("at most s", _seconds(newest.bound_s), justify="right")
    for name in data.operators:
        parts = [point.operators[name] for point in data.checkpoints if name in point.operators]
        sizes = {form: [part.bytes for part in parts if part.form is form] for form in Form}
        # Files begin a chain as bases do.
        bases, deltas, last = sizes[Form.BASE] + sizes[Form.FILES], sizes[Form.DELTA], parts[-1]
        table.add_row(
            name,
            f"{last.rows:,}",
            str(len(bases)),
            _mean(bases),
            str(len(deltas)),
            _mean(deltas),
            str(last.d),
            filesize.decimal(last.chain_bytes),
            _size(last.bound_bytes),
            _ratio(data, name),
            "",
            _seconds(last.bound_s),
        )
    return table


def checkpoint_table(data: ReportData, newest: int | None = None) -> Table:
    """Make a table with one row per checkpoint, oldest first; `newest` limits it to that many of the newest. Each
    operator's column shows form and D."""
    table = Table(box=None)
    table.add_column("id", justify="right")
    for name in data.operators:
        table.add_column(f"{name} D", no_wrap=True)
    for head in ("bytes", "restore reads", "restore s"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("event time", no_wrap=True)
    table.add_column("proven")
    for point in data.checkpoints[-newest:] if newest else data.checkpoints:
        table.add_row(
            str(point.record.id),
            *(_form(point.operators.get(name)) for name in data.operators),
            filesize.decimal(point.record.bytes),
            filesize.decimal(point.chain_bytes),
            _seconds(point.record.restore_s),
            f"{point.record.event_time_max:%Y-%m-%d}" if point.record.event_time_max else "-",
            _PROOF[point.record.proven],
        )
    return table


def _form(part: OperatorPart | None) -> Text:
    """Return form and D; bases and files are bold, since a chain begins with each."""
    if part is None:
        return Text("-")
    return Text(f"{part.form.value} {part.d}", style="" if part.form is Form.DELTA else "bold")


def _describe_measured(data: ReportData) -> str:
    """Return the newest checkpoint's measured restore, or else the last one measured and its checkpoint."""
    found: list[CheckpointPoint] = [point for point in data.checkpoints if point.record.restore_s is not None]
    if not found:
        return "-"
    return _seconds(found[-1].record.restore_s) + ("" if found[-1] is data.newest else f" (at {found[-1].record.id})")


def _mean(sizes: list[int]) -> str:
    return filesize.decimal(round(sum(sizes) / len(sizes))) if sizes else "-"


def _ratio(data: ReportData, operator: str) -> str:
    """Return the chain's current bytes per byte of live state."""
    found = data.materialization.get(operator)
    ratio = None if found is None else found.facts.amplification
    return "-" if ratio is None else f"{ratio:.2f}"


def _size(count: float | None) -> str:
    return "-" if count is None else filesize.decimal(round(count))


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

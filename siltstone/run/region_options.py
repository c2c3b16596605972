"""Options of one run of a consistent region."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from siltstone.changelog.carried_rules import inline_limit_bytes
from siltstone.changelog.upload_options import UploadOptions
from siltstone.run.protocol_rules import Interval
from siltstone.run.stream_clock import time_us
from siltstone.stream import Stream


@dataclass(frozen=True)
class RegionOptions:
    """Options of one run.

    Attributes:
        parallelism: subtasks per operator; may differ from the run before.
        backend: name of the working state backend.
        checkpoint_steps: steps per checkpoint, unless `checkpoint_s` is set.
        checkpoint_s: seconds between checkpoints.
        checkpoint_idle_s: seconds without a step after which an interval of fewer than `checkpoint_steps` ends.
        max_pending: most checkpoints on their way to the store while the stream goes on; 0: it waits for each.
        postpones_bases: whether bases that end chains are left to materializations (`chains.postpone_rules`).
        options: the source options, recorded by the first run and fixed from then on.
        log_steps: whether what a step changes is logged, before the checkpoint that includes it. If not, the working
            state alone knows it, and a stream that loses some goes back to its newest checkpoint.
        drop: `OPERATOR` or `OPERATOR.VARIABLE` that the code no longer has and whose state to give up.
        upload: options of uploads to the store.
        keep_outputs: how long what sinks were given is kept after they have it.
        tables: the sinks that are tables, for which rows are staged as the table's files.
        placed: whether each subtask runs where its working state is unless a machine is lost. If not, every step is
            logged, even while each checkpoint is a base.
        time_us: returns the driver's time of day, in microseconds since 1970.
    """

    parallelism: int = 1
    backend: str = "heap"
    checkpoint_steps: int = 1
    checkpoint_s: float | None = None
    checkpoint_idle_s: float = Interval().idle_s
    max_pending: int = 0
    postpones_bases: bool = False
    log_steps: bool = True
    options: Mapping[str, str] = field(default_factory=dict)
    drop: Sequence[str] = ()
    upload: UploadOptions = field(default_factory=UploadOptions)
    keep_outputs: timedelta = timedelta(0)
    tables: frozenset[str] = frozenset()
    placed: bool = True
    time_us: Callable[[], int] = time_us


def bound_inline(options: RegionOptions, stream: Stream) -> RegionOptions:
    """Lower `upload.inline_bytes` so far that the acknowledgements of a step are bounded in total."""
    parts = sum(1 + len(op.outputs.keys() & stream.sinks) + bool(stream.dead_letters) for op in stream.operators)
    limit = inline_limit_bytes(options.upload.inline_bytes, options.parallelism, parts)
    return replace(options, upload=options.upload.model_copy(update={"inline_bytes": limit}))

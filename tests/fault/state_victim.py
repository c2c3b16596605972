"""A process that works on the state of a backend until it is killed; `test_state_torn.py` runs it.

state_victim.py BACKEND lines DIRECTORY    for each line of standard input `COPY AT`: fork a child that runs steps on
                                           the state in COPY and kills itself (-9) at the AT-th line of
                                           siltstone.state.backends
state_victim.py BACKEND loop DIRECTORY     step after step, printing each version committed, until killed
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

from siltstone.state.backend import SubtaskState
from siltstone.state.backends.heap import index, table
from siltstone.state.backends.named import backend
from siltstone.state.schema import TableSchema
from tests.state_model import ALL, MAX_PARALLELISM, batch_of

NUMBERS = TableSchema(pa.schema([("k", pa.int64())]), pa.schema([]), pa.schema([("v", pa.int64())]))
WORDS = TableSchema(pa.schema([("k", pa.string())]), pa.schema([]), pa.schema([("v", pa.string())]))
SEGMENT_BITS, MAX_LOAD = 7, 0.3
"""so small that each step splits segments of the heap's index"""
BACKENDS = os.sep + os.path.join("siltstone", "state", "backends") + os.sep


def open_state(kind: str, directory: Path) -> SubtaskState:
    return backend(kind).open(directory, {"numbers": NUMBERS, "words": WORDS}, ("model",), ALL, MAX_PARALLELISM)


def run_step(state: SubtaskState, step: int, keys: int) -> None:
    """A step that does everything, the same each time: replace, insert, grow, delete, mark, set bytes."""
    rng = np.random.default_rng(step)
    state.begin(step, tracking=True)
    for name, schema in (("numbers", NUMBERS), ("words", WORDS)):
        kept = state.tables[name]
        chosen = rng.choice(keys * 2, keys, replace=False)
        values = rng.integers(0, 10**9, keys)
        whole = pa.table({"k": pa.array(chosen)}), pa.table({"v": pa.array(values)})
        if schema is WORDS:
            whole = tuple(part.cast(pa.schema([(part.column_names[0], pa.string())])) for part in whole)
        batch = batch_of(schema, whole[0])
        kept.get(batch)
        kept.put(batch, whole[1])
        kept.delete(batch_of(schema, whole[0].slice(0, keys // 3)))
        if step % 3 == 0:
            kept.mark()
        kept.put(batch_of(schema, whole[0].slice(0, keys // 6)), whole[1].slice(0, keys // 6))
    state.set_opaque("model", {step % MAX_PARALLELISM: str(step).encode()})
    state.commit()


def thin_out(state: SubtaskState, step: int) -> None:
    """A step that deletes nearly everything, so that the next one finds it worth to compact."""
    state.begin(step, tracking=True)
    for name, schema in (("numbers", NUMBERS), ("words", WORDS)):
        everything = pa.table({"k": pa.array(range(10, 600))}).cast(schema.primary_key)
        state.tables[name].mark()
        state.tables[name].delete(batch_of(schema, everything))
    state.commit()


def dying_child(kind: str, directory: Path, at: int) -> None:
    """Open, run a step, thin out, begin a step (which compacts), reopen: die at the `at`-th line on the way."""
    lines = 0

    def count(frame, event, _):
        nonlocal lines
        if BACKENDS not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines += 1
            if lines == at:
                os.kill(os.getpid(), signal.SIGKILL)
        return count

    sys.settrace(count)
    state = open_state(kind, directory)
    step = state.version + 1
    run_step(state, step, 300)
    thin_out(state, step + 1)
    state.release(step + 1)
    state.begin(step + 2, tracking=True)
    state.rollback()
    state.close()
    open_state(kind, directory).close()
    sys.settrace(None)
    print("lived", lines, flush=True)


def main() -> None:
    kind, mode, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    backend(kind)  # imported here, not by each child
    table.COMPACT_ROWS, index.SEGMENT_BITS, index.MAX_LOAD = 50, SEGMENT_BITS, MAX_LOAD
    if mode == "loop":
        state = open_state(kind, directory)
        while True:
            step = state.version + 1
            run_step(state, step, 20_000)
            print(step, flush=True)
            state.release(step - 2)
    for line in sys.stdin:
        copy, at = line.split()
        child = os.fork()
        if child == 0:
            dying_child(kind, directory / copy, int(at))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print("died" if os.WIFSIGNALED(status) else "ended", flush=True)


if __name__ == "__main__":
    main()

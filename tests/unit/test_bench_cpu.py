"""CPU seconds of processes and their descendants, also of those that end while they are watched."""

import signal
import subprocess
import sys

import pytest

from benchmarks.cpu import CpuSeconds
from benchmarks.sampling import PROC

BURNT_S = 0.6
CHILD = f"""
import time
while time.process_time() < {BURNT_S}: pass
print("burnt", flush=True)
input()
"""
PARENT = """
import signal, subprocess, sys, time
signal.signal(signal.SIGCHLD, signal.Handlers(int(sys.argv[1])))
child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdin=subprocess.PIPE)
input()
child.stdin.close()
child.wait()
print("ended", flush=True)
input()
end = time.process_time() + float(sys.argv[3])
while time.process_time() < end: pass
print("burnt", flush=True)
input()
"""


@pytest.mark.skipif(not PROC.is_dir(), reason="reads /proc")
@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN], ids=["waits", "as PySpark's daemon"])
def test_a_process_that_has_ended_counts_once(handler: signal.Handlers) -> None:
    """The kernel adds the first child's time to its parent's, and drops the second's."""
    command = [sys.executable, "-c", PARENT, str(int(handler)), CHILD, str(BURNT_S)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        cpu = CpuSeconds([parent.pid])
        assert parent.stdout.readline() == "burnt\n"
        cpu.take()
        parent.stdin.write("\n")
        assert parent.stdout.readline() == "ended\n"
        cpu.take()
        parent.stdin.write("\n")
        assert parent.stdout.readline() == "burnt\n"
        cpu.take()
        parent.kill()
    cpu.take()
    burnt, ended, both, gone = (seconds for _, seconds in cpu.samples)
    assert BURNT_S - 0.02 <= burnt <= ended < 1.7 * BURNT_S, "not twice"
    assert ended + BURNT_S - 0.02 <= both == gone < 2.7 * BURNT_S, "what the parent uses comes on top"


def test_seconds_between_two_times_are_interpolated() -> None:
    cpu = CpuSeconds([], [(10.0, 1.0), (11.0, 2.0), (12.0, 4.0)])
    assert cpu.between(10.5, 11.5) == pytest.approx(1.5)
    with pytest.raises(ValueError, match="sampled from 10"):
        cpu.between(11, 12.1)
    assert CpuSeconds([]).between(0, 1) is None

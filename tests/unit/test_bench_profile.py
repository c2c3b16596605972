"""The profile of a step: samples are given to phases, laid out as flame graphs, and jobs are taken apart."""

import json
from pathlib import Path

import pytest

from benchmarks.flames import DRIVER, Phase, boxes, by_phase, draw, milliseconds, read_stacks
from benchmarks.profile import job_table, parts_of, read_jobs

BEGIN = Phase("begin", DRIVER, "begin", "a/region.py")
COMMIT = Phase("commit", DRIVER, "commit", "a/region.py")
STACKS = """\
process 1:"python -m x; y";loop (t.py:1);begin (/x/a/region.py:3);read (b.py:7) 2
process 1:"python -m x; y";loop (t.py:1);begin (/x/a/region.py:4);read (b.py:9);wait (c.py:1) 3
process 1:"python -m x; y";loop (t.py:1);begin (/x/a/region.py:5) 1
process 1:"python -m x; y";loop (t.py:1);Region.commit (/x/a/region.py:9);begin (/x/a/region.py:3) 4
process 1:"python -m x; y";loop (t.py:1);begin (/x/b/region.py:3) 8
"""


@pytest.fixture
def stacks(tmp_path: Path) -> Path:
    path = tmp_path / "stacks.txt"
    path.write_text(STACKS)
    return path


def test_a_sample_is_of_the_outermost_phase(stacks: Path) -> None:
    phases = by_phase(read_stacks(stacks), [BEGIN, COMMIT])
    assert {phase.name: sum(found.values()) for phase, found in phases.items()} == {"begin": 6, "commit": 4}
    assert milliseconds(phases[BEGIN], rate=200, steps=3) == 10


def test_boxes_lie_above_their_callers_and_lines_of_a_function_are_one(stacks: Path) -> None:
    found = list(boxes(by_phase(read_stacks(stacks), [BEGIN, COMMIT])[BEGIN]))
    assert found == [("begin (region.py)", 0, 0, 6), ("read (b.py)", 1, 0, 5), ("wait (c.py)", 2, 0, 3)]


def test_phases_are_drawn(stacks: Path, tmp_path: Path) -> None:
    draw(by_phase(read_stacks(stacks), [BEGIN, COMMIT]), 200, 3, tmp_path / "picture.svg", "a step")
    assert "driver: begin, 10.0 ms" in (tmp_path / "picture.svg").read_text()


def test_a_job_is_taken_apart(tmp_path: Path) -> None:
    def task(stage: int, launched: int, finished: int, ran: int) -> dict[str, object]:
        info = {"Launch Time": launched, "Finish Time": finished}
        metrics = {"Executor Run Time": ran, "Executor Deserialize Time": 1}
        return {"Event": "SparkListenerTaskEnd", "Stage ID": stage, "Task Info": info, "Task Metrics": metrics}

    start = {"Event": "SparkListenerJobStart", "Job ID": 3, "Submission Time": 100, "Stage IDs": [8, 7]}
    tasks = [task(7, 110, 130, 15), task(7, 112, 126, 10), task(8, 135, 175, 30)]
    end = {"Event": "SparkListenerJobEnd", "Job ID": 3, "Completion Time": 180}
    events = tmp_path / "events"
    events.write_text("\n".join(map(json.dumps, [{"Event": "SparkListenerLogStart"}, start, *tasks, end])))
    [job] = read_jobs(events)
    assert parts_of(job) == {
        "until stage 1 begins": 10,
        "stage 1, from its first task to its last": 20,
        "stage 1: its slowest task runs": 15,
        "stage 1: a task is unpacked": 1,
        "until stage 2 begins": 5,
        "stage 2, from its first task to its last": 40,
        "stage 2: its slowest task runs": 30,
        "stage 2: a task is unpacked": 1,
        "until the job ends": 5,
        "the job": 80,
    }
    assert job_table(events, 1, "a job").row_count == 10

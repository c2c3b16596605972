"""The engine's events in the log of a Dagster run, as `siltstone ui` sets Dagster up."""

import dagster as dg
import yaml

from siltstone import log, ui

OURS = log.get_logger("siltstone.lifecycle.of_a_test")


@dg.op
def work() -> None:
    OURS.info("retention deleted checkpoints", stream="s", checkpoints=2)
    OURS.debug("step processed")


@dg.job
def working() -> None:
    work()


def test_events_of_a_run_stand_in_its_log() -> None:
    given = {"python_logs": yaml.safe_load(ui.INSTANCE)["python_logs"]}
    with dg.DagsterInstance.ephemeral(settings=given) as instance:
        ended = working.execute_in_process(instance=instance)
        told = [entry.user_message for entry in instance.all_logs(ended.run_id) if entry.dagster_event is None]
    assert told == ["retention deleted checkpoints stream=s checkpoints=2"]

"""What `import siltstone` gives, and what it costs."""

import subprocess
import sys
from pathlib import Path

import siltstone as st

ROOT = Path(__file__).parents[2]
PUBLIC = {
    "Operator KeyedProcessor Rows State Stream DeltaSink ParquetSink JdbcSink KafkaSink ArrowSink Secret open",
    "write_stream Client StreamClient Autonomous EventTime Due Deduplicate IntervalJoin LookupJoin",
    "ValueState MapState ListState WindowState OpaqueState BroadcastState Timer TTL",
    "Aggregate Average Count First Last Max Min Sum ApproxDistinct CollectList TopN Function",
    "Tumbling Sliding Cumulative Session Bloom avro_schema xxhash64",
    "SiltstoneError UsageError UnknownStream UnknownCheckpoint SchemaConflict BadRow WrongWarehouse LossRefused",
    "NewerFormat StateError CorruptObject NoLiveState ProofFailed Unreachable Fenced Stopped",
}
HEAVY = (
    *("pyspark", "pandas", "matplotlib", "boto3", "sqlalchemy", "pyarrow", "dagster", "deltalake", "confluent_kafka"),
    "fastavro",
)


def loaded(code: str) -> set[str]:
    """The modules that a fresh Python has loaded after `code`."""
    script = f"{code}\nimport sys; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_the_door_has_these_names_and_no_others() -> None:
    assert set(st.__all__) == {name for names in PUBLIC for name in names.split()}
    assert dir(st) == sorted(st.__all__)
    for name in st.__all__:
        assert getattr(st, name).__module__.startswith("siltstone."), name


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(st, "Operators")


def test_import_loads_nothing_heavy() -> None:
    assert not loaded("import siltstone") & {*HEAVY, "numpy", "pydantic"}


def test_the_command_line_loads_nothing_that_its_help_does_not_need() -> None:
    assert not loaded("import siltstone.cli") & set(HEAVY)

"""A Spark session with Kafka's connector, and the broker that tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.spark.session import spark_session
from tests import jvm
from tests.kafka_server import KafkaServer, connector_jars, shared_kafka
from tests.kafka_streams import ADDRESS
from tests.places import place_at


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A local Spark of two cores with the connector, in place of the one of tests/conftest.py."""
    settings = {"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "2", "spark.jars": connector_jars()}
    session = spark_session("local[2]", settings | jvm.PLANTED_SETTINGS, steps=True)
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> KafkaServer:
    """The broker, whose address streams know."""
    server = shared_kafka()
    monkeypatch.setenv(ADDRESS, server.address)
    assert os.environ[ADDRESS] == server.address
    return server


@pytest.fixture
def place(tmp_path: Path) -> Iterator[OpenWarehouse]:
    """An empty warehouse `w` in the test's directory."""
    with place_at(tmp_path / "w") as opened:
        yield opened

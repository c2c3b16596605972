"""The blocks of docs/kafka.md, in an environment that pip alone has made, with a broker."""

import json
import re
from pathlib import Path

import pytest

from tests.kafka_server import KafkaServer, connector_jars
from tests.pages import blocks
from tests.user.conftest import Environments, environments
from tests.user.reader import reading

__all__ = ["environments"]  # the fixture

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_each_block_of_the_page_does_what_it_says(environments: Environments, tmp_path: Path) -> None:
    """On a broker of its own, which has none of the topics."""
    server = KafkaServer()
    (tmp_path / "guide").mkdir()
    environment = environments("dagster", "kafka") | {  # the former to load a siltstone.toml
        "HOME": str(tmp_path),
        "KAFKA": server.address,
        "SILTSTONE_STREAMS": '["./spent.py"]',
        "SILTSTONE_MASTER": "local[2]",
        # In place of what the page lets Spark fetch.
        "SILTSTONE_SPARK": json.dumps({"spark.jars": connector_jars()}),
    }
    environment.pop("XDG_STATE_HOME", None)
    try:
        with reading(tmp_path / "guide", environment) as reader:
            said = ""
            for block in blocks("docs/kafka.md"):
                if block.unrun is None:  # tests/user has the list of the others
                    said += reader.follow(block, said)
    finally:
        server.remove()
    assert re.search(r"^input source read up to orders 0: [\d,]+, 1: [\d,]+, 2: [\d,]+$", said, re.MULTILINE), said
    assert said.rstrip().endswith(str(sum(range(3000)))), said

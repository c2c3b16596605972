"""Every code block of the README and of the guide does what it says, in an environment that pip alone has made.

Blocks are run in order, in one directory: what a page makes is there for the next. `sh` and `python` blocks are run, a
`toml` or `yaml` block is loaded by what reads such a file, a `text` block is what the blocks before it printed. Of a
block that cannot be run, commands and options are looked up.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import servers
from tests.pages import blocks, named_in_text, pages
from tests.postgres_server import postgres_server
from tests.store_cases_s3 import fresh_bucket
from tests.user.conftest import Environments
from tests.user.reader import Reader, reading
from tests.wheel import run_in

UNRUN = [
    ("README.md", "needs a checkout"),
    ("docs/first-hour.md", "needs a checkout"),
    ("docs/first-hour.md", "goes on until it is stopped"),
    ("docs/first-hour-in-the-ui.md", "needs a checkout"),
    ("docs/first-hour-in-the-ui.md", "serves until it is stopped"),
    ("docs/kafka.md", "needs Spark's package for Avro"),
    ("docs/when-something-broke.md", "needs a lost catalog"),
    ("docs/forks-and-edits.md", "needs code that has lost them"),
    ("docs/dagster.md", "serves until it is stopped"),
]
"""the blocks that are not run: `siltstone ui` and `--follow` are elsewhere in this room and in tests/system"""
ELSEWHERE = {
    "docs/backup.md": "tests/system/test_backup.py",
    "docs/dagster-in-production.md": "tests/system/test_production.py",
    "docs/kafka.md": "tests/kafka/test_kafka_guide.py",
}
"""page -> the tests that run its blocks: they lose a catalog for it, or start a deployment or a broker"""
RULE = re.compile(r"\d\. .* ─+")


@pytest.fixture(scope="module")
def reader(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Somebody with the packaged demo in the directory, a bucket of an S3 server, and a PostgreSQL."""
    server = servers.versitygw() if servers.versitygw_binary() else servers.moto()
    _, bucket = fresh_bucket(server)
    directory, home = tmp_path_factory.mktemp("guide"), tmp_path_factory.mktemp("home")
    with postgres_server() as catalog:
        environment = environments("dagster", "demo", "postgres", further=["dagster-dg-cli", "pytest"]) | {
            "HOME": str(home),
            "AWS_ENDPOINT_URL_S3": server.endpoint,
            "AWS_ACCESS_KEY_ID": servers.ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": servers.SECRET_KEY,
            "BUCKET": bucket,
            "CATALOG": catalog.set(drivername="postgresql").render_as_string(hide_password=False),
            "SILTSTONE_STREAMS": '["./spenders.py", "siltstone.demo_streams"]',
            "SILTSTONE_MASTER": "local[2]",
        }
        environment.pop("XDG_STATE_HOME", None)
        with reading(directory, environment) as reader:
            yield reader


def test_the_demo_needs_no_checkout(reader: Reader) -> None:
    program = str(Path(reader.environment["VIRTUAL_ENV"], "bin", "siltstone"))
    said = run_in(reader.directory, without_settings(reader), program, "demo", "--seed", "1")
    assert re.search(r"336,776 flights in the source, 336,776 counted", said.replace("\n", " ")), said
    assert (reader.directory / "warehouse" / "flights-chain.png").is_file()
    lines = [line for line in said.splitlines() if not line.startswith("Picture: ")]
    assert {len(line) for line in lines if RULE.match(line)} == {100}
    assert max(map(len, lines)) == 100, "a pipe is 100 columns wide"


def without_settings(reader: Reader) -> dict[str, str]:
    """The reader's environment where a project of its own says what its streams are."""
    return {name: value for name, value in reader.environment.items() if not name.startswith("SILTSTONE_")}


@pytest.mark.parametrize("page", [page for page in pages() if page not in ELSEWHERE])
def test_each_block_of_a_page_does_what_it_says(page: str, reader: Reader) -> None:
    said = ""
    for block in blocks(page):
        said += reader.follow(block, said)


@pytest.mark.parametrize("page", pages())
def test_commands_and_options_in_the_text_of_a_page_are_there(page: str, reader: Reader) -> None:
    for named in named_in_text(page):
        if named.startswith(("siltstone ", "--")) and "COMMAND" not in named:
            reader.ask("names", named)


def test_dg_checks_the_project_that_the_guide_has_made(reader: Reader) -> None:
    dg = "import sys; from dagster_dg_cli.cli import main; sys.argv = ['dg', *sys.argv[1:]]; main()"
    project, environment = reader.directory / "shop", without_settings(reader)
    said = run_in(project, environment, "python", "-c", dg, "check", "defs")
    assert "All definitions loaded successfully" in said
    listed = "from importlib.metadata import entry_points as e; print(e(group='dagster_dg_cli.registry_modules'))"
    assert "value='siltstone.dagster'" in run_in(project, environment, "python", "-c", listed), (
        "where dg finds components"
    )


def test_blocks_that_are_not_run_are_these() -> None:
    found = [block for page in pages() for block in blocks(page)]
    assert [(block.page, block.unrun) for block in found if block.unrun] == UNRUN
    assert {block.page for block in found if block.note and not block.unrun and not block.file} == set()
    for page, tests in ELSEWHERE.items():
        assert page in (Path(__file__).parents[2] / tests).read_text()

"""A streaming source in Python that begins at "latest", as a message queue does.

Spark imports this module in several new processes per query, so it imports little.
"""

from collections.abc import Iterator
from pathlib import Path
from unittest import SkipTest

try:
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
except ModuleNotFoundError:
    DataSource = DataSourceStreamReader = InputPartition = object

HEAD, CALLS, GROWS = "head", "calls", "grows"
"""files in the source's directory: how many messages there are, what Spark has called, and, if it exists, that messages
keep arriving"""


def arrive(directory: Path, messages: int) -> None:
    """Let the source have so many messages in all; the number of the first is 0."""
    if DataSource is object:
        raise SkipTest("before 4.0, Spark has no data sources in Python")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / HEAD).write_text(str(messages))


def keep_arriving(directory: Path) -> None:
    """Let one more message arrive whenever Spark asks for the latest offset."""
    (directory / GROWS).touch()


def calls(directory: Path, name: str) -> list[int]:
    """What Spark has called the reader's `commit` with, or what `initialOffset` has returned: offsets, in order."""
    path = directory / CALLS
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(line.split()[1]) for line in lines if line.split()[0] == name]


class LatestReader(DataSourceStreamReader):
    """Offsets are numbers of messages."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def initialOffset(self) -> dict[str, int]:
        return {"next": self._note("initial", self._head())}

    def latestOffset(self) -> dict[str, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if (self.directory / GROWS).exists():
            arrive(self.directory, self._head() + 1)
        return {"next": self._head()}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition((start["next"], end["next"]))]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        for number in range(*partition.value):
            yield (number,)

    def commit(self, end: dict[str, int]) -> None:
        self._note("commit", end["next"])

    def _head(self) -> int:
        return int((self.directory / HEAD).read_text())

    def _note(self, name: str, value: int) -> int:
        with (self.directory / CALLS).open("a") as calls:
            calls.write(f"{name} {value}\n")
        return value


class LatestSource(DataSource):
    """Format `begins_latest`; option `directory`."""

    @classmethod
    def name(cls) -> str:
        return "begins_latest"

    def schema(self) -> str:
        return "value long"

    def streamReader(self, schema: object) -> LatestReader:
        return LatestReader(Path(self.options["directory"]))

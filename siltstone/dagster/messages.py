"""Read what a process on this machine reports to Dagster Pipes, message by message, each whole.

Dagster's own reader of a file takes what stands in it for whole lines. A process that is just writing a long one (the
picture of a chain is some ten thousand characters) has then ended half a message: the reader stops there, and with it
all that the run reported. Here a line ends with its line break.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from dagster._core.pipes.context import PipesMessageHandler
from dagster._core.pipes.utils import PipesFileMessageReader, PipesTempFileMessageReader
from dagster._utils import tail_file
from dagster_pipes import PipesParams


class WholeMessages(PipesTempFileMessageReader):
    """The reader of messages for a `dg.PipesSubprocessClient` that launches a command of `siltstone`.

    client = dg.PipesSubprocessClient(message_reader=WholeMessages())
    """

    @contextmanager
    def read_messages(self, handler: PipesMessageHandler) -> Iterator[PipesParams]:
        """Read messages in a thread for as long as the `with` block runs; it gives what the process has to know."""
        with tempfile.TemporaryDirectory() as place:
            reader = _WholeLines(str(Path(place) / "messages"))
            with reader.read_messages(handler) as params:
                yield params


class _WholeLines(PipesFileMessageReader):
    """Reads a file that grows by whole lines."""

    def _reader_thread(self, handler: PipesMessageHandler, is_resource_complete: Event) -> None:
        line = ""
        try:
            for piece in tail_file(self._path, is_resource_complete.is_set):
                line += piece
                if line.endswith("\n"):
                    handler.handle_message(json.loads(line))
                    line = ""
        except BaseException:
            handler.report_pipes_framework_exception(f"{type(self).__name__} reader thread", sys.exc_info())
            raise

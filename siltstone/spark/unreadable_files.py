"""Go on without files that Spark cannot read (`Stream.on_bad_file`).

A file that is cut or has other types fails the step that reads it, perhaps after some of its rows were read. Then the
run goes back to its newest checkpoint, as in a reset: that undoes the step. When the file fails a second time, its
content is the reason. From then on, the run stops its query at a batch with the file, takes the file out of the batch
in Spark's record, and begins the query again (`SourceLog.reduce`). Spark runs the batch with the same offsets and
without the file, which it knows as seen. The input log records the file as unread, with the reason, so that the step
runs without it whenever it is run again, and the sink of dead letters has the file's name once.

A run that ends before that forgets what it found, and the next one finds it again. A logged step is never changed: a
file that can no longer be read stops a replay. So does a file that two sources of the step read, because Spark does not
say which of them could not, and one that goes on changing.
"""

import re
from collections import Counter
from collections.abc import Sequence
from urllib.parse import unquote

from siltstone.catalog.records.source_entries import LoggedFile
from siltstone.log import get_logger
from siltstone.spark.failures import find_unreadable

FAILURES_MAX = 5
"""how often a file may fail a step, if it changes in between"""
_SCHEME = re.compile(r"^([A-Za-z0-9]+):/+")
_LOG = get_logger(__name__)


class UnreadableFiles:
    """The files that one run could not read. A file that was modified since is another one.

    Attributes:
        has_news: whether the newest epoch has found out something, so that its failed step may be run again.
    """

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self.has_news = False
        self._failures = Counter[str]()
        """URL -> how often the file failed a step"""
        self._suspects: set[tuple[str, int]] = set()
        """URL and modification time of those that failed a step"""
        self._reasons: dict[tuple[str, int], str] = {}

    def note(self, error: BaseException, files: Sequence[LoggedFile]) -> None:
        """Note which of the files of a step failed it, if one did."""
        named = find_unreadable(error)
        if named is None:
            return
        name, reason = named
        exact = [file for file in files if file.path == name]
        found = exact or [file for file in files if _plain(file.path) == _plain(name)]
        if len(found) != 1:
            return
        [file] = found
        known = file.path, file.modified_ms
        self._failures[file.path] += 1
        self.has_news = known not in self._reasons and self._failures[file.path] <= FAILURES_MAX
        if self.has_news and known in self._suspects:
            self._reasons[known] = reason
            _LOG.warning("going on without a file", stream=self._stream, file=file.path, error=reason)
        self._suspects.add(known)

    @property
    def is_empty(self) -> bool:
        """Whether steps may read every file."""
        return not self._reasons

    def reason(self, file: LoggedFile) -> str | None:
        """Return why no step may read a file; None if it may."""
        return self._reasons.get((file.path, file.modified_ms))


def _plain(url: str) -> str:
    """Return a URL in one of the ways in which it may be written: Spark escapes it in some places."""
    return unquote(_SCHEME.sub(r"\1:/", url))

"""Keep a run's metrics in a file as OpenMetrics text, for a collector."""

import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from siltstone.catalog.repository import Catalog
from siltstone.chains.due import OperatorHealth, materialization_health
from siltstone.chains.metrics import dead_letter_metric, health_metrics
from siltstone.changelog.upload_metrics import UploadStatistics, openmetrics
from siltstone.errors import Unreachable
from siltstone.log import get_logger
from siltstone.run.region import Completed
from siltstone.settings import Settings
from siltstone.store.files import replace_file
from siltstone.store.filesystem import translate_errors

_LOG = get_logger(__name__)


class RunMetrics:
    """Counts uploads and dead letters of one run, including its background materializations, and writes the metrics.

    Safe to call from the run's thread and from its background thread.

    Args:
        settings: `openmetrics` names the file; None writes nothing.

    Raises:
        Unreachable: the file cannot be written. After the constructor, that is only a warning.
    """

    def __init__(self, settings: Settings, stream: str) -> None:
        self._settings, self._stream = settings, stream
        self._path = settings.openmetrics and Path(str(settings.openmetrics).replace("{stream}", stream))
        self.uploads = UploadStatistics()
        self._lock = threading.Lock()
        self.dead_letters = Counter[str]()
        if self._path is not None:
            self._write(self._path, {})

    def add_checkpoint(self, catalog: Catalog, checkpoint: Completed) -> None:
        """Count a completed checkpoint, and write the file."""
        with self._lock:
            self.dead_letters.update(checkpoint.dead_letters)
        self.add_uploads(catalog, checkpoint.uploads)

    def add_uploads(self, catalog: Catalog, uploads: UploadStatistics) -> None:
        """Count uploads, such as a materialization's, and write the file."""
        with self._lock:
            self.uploads = self.uploads.merge(uploads)
        if self._path is None:
            return
        settings = self._settings
        try:
            health = materialization_health(catalog, self._stream, settings.materialization, settings.policy_options)
            with self._lock:
                self._write(self._path, health)
        except Unreachable as error:
            _LOG.warning("cannot write metrics", error=str(error))

    def _write(self, path: Path, health: Mapping[str, OperatorHealth]) -> None:
        """Replace the file atomically, so that a collector never reads half of it."""
        further = [*health_metrics(health, self._stream), dead_letter_metric(self.dead_letters, self._stream)]
        with translate_errors(f"write the metrics to {path}"):
            replace_file(path, openmetrics(self.uploads, {"stream": self._stream}, further).encode())

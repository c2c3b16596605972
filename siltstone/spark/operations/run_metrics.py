"""Keep a run's metrics in a file as OpenMetrics text, and serve them to Prometheus while the run is at work."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from siltstone.catalog.repository import Catalog
from siltstone.chains.due import OperatorHealth, materialization_health
from siltstone.chains.metrics import health_metrics, row_metrics
from siltstone.changelog.upload_metrics import UploadStatistics, openmetrics, registry_of, upload_families
from siltstone.errors import Unreachable, UsageError
from siltstone.log import get_logger
from siltstone.run.progress import RunProgress
from siltstone.run.region import Completed
from siltstone.settings import Settings, parse_address
from siltstone.store.filesystem import translate_errors
from siltstone.store.private import replace_file

if TYPE_CHECKING:
    from threading import Thread
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.metrics_core import Metric

_LOG = get_logger(__name__)


class RunMetrics:
    """Counts uploads and dead letters of one run, including its background materializations, and shows the metrics.

    Safe to call from the run's thread and from its background thread.

    Attributes:
        progress: the run's steps and checkpoints; only served, since a file would be out of date between checkpoints.
        beside: the metrics of runs that are served with this one's.

    Args:
        settings: `openmetrics` names the file; None writes nothing. `metrics_port` is where `serve` listens.

    Raises:
        Unreachable: the file cannot be written. After the constructor, that is only a warning.
    """

    def __init__(self, settings: Settings, stream: str) -> None:
        self._settings, self._stream = settings, stream
        self._path = settings.openmetrics and Path(str(settings.openmetrics).replace("{stream}", stream))
        self.progress = RunProgress(stream)
        self.beside: list[RunMetrics] = []
        self.uploads = UploadStatistics()
        self._server: tuple[WSGIServer, Thread] | None = None
        self._lock = threading.Lock()
        self.dead_letters, self.late = Counter[str](), Counter[str]()
        if self._path is not None:
            self._write(self._path, {})

    def serve(self) -> str | None:
        """Serve the metrics over HTTP until `close`, in a thread of their own; return the URL.

        Nothing is served, and None returned, unless the settings have `metrics_port`.

        Raises:
            UsageError: the address cannot be listened on.
        """
        if self._settings.metrics_port is None:
            return None
        from prometheus_client import start_http_server

        host, port = parse_address(self._settings.metrics_port)
        try:
            self._server = start_http_server(port, host, registry_of(self._merge_families))
        except OSError as error:
            raise UsageError(
                f"metrics cannot be served on {host} port {port}: {error.strerror or error}; end what listens there, "
                "or give another --metrics-port"
            ) from None
        for each in (self, *self.beside):
            each.progress.is_watched = True
        url = f"http://{f'[{host}]' if ':' in host else host}:{self._server[0].server_port}/metrics"
        _LOG.debug("serving metrics", stream=self._stream, url=url)
        return url

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
            self._server = None

    def begin_epoch(self, catalog: Catalog, completed: int) -> None:
        """Note that a writer epoch of the run begins after checkpoint `completed`, 0 for none."""
        if self.progress.is_watched:
            self.progress.begin_epoch(catalog.checkpoints.get(self._stream, completed) if completed else None)

    def _merge_families(self) -> "Iterator[Metric]":
        """Each family once, with the samples of all runs."""
        families: dict[str, Metric] = {}
        for family in (family for each in (self, *self.beside) for family in each.families()):
            if (first := families.setdefault(family.name, family)) is not family:
                first.samples += family.samples
        yield from families.values()

    def families(self) -> "Iterator[Metric]":
        """Yield what is known now."""
        with self._lock:
            uploads, dead_letters, late = self.uploads, dict(self.dead_letters), dict(self.late)
        yield from self.progress.families()
        yield from upload_families(uploads, {"stream": self._stream})
        yield from row_metrics(dead_letters, late, self._stream)

    def add_checkpoint(self, catalog: Catalog, checkpoint: Completed) -> None:
        """Count a completed checkpoint, and write the file."""
        with self._lock:
            self.dead_letters.update(checkpoint.dead_letters)
            self.late.update(checkpoint.late)
        self.progress.add_checkpoint(checkpoint)
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
        rows = row_metrics(self.dead_letters, self.late, self._stream)
        further = [*health_metrics(health, self._stream), *rows]
        with translate_errors(f"write the metrics to {path}"):
            replace_file(path, openmetrics(self.uploads, {"stream": self._stream}, further).encode())

"""Send alerts to the log or to a webhook. A notifier of your own is a resource with a method `notify`."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass

import dagster as dg
import requests
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_exponential

from siltstone.errors import Unreachable, UsageError
from siltstone.settings import CONFIGURATION, load_settings

TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Alert:
    """A condition of a stream that needs attention.

    Attributes:
        stream: name of the stream.
        kind: `proof`, `materialization` or `stream`.
        message: what is wrong, in one line.
        since: what identifies the alert with its kind, such as the time since when (ISO 8601) or the checkpoint.
    """

    stream: str
    kind: str
    message: str
    since: str


class Notifier(dg.ConfigurableResource, ABC):
    """Sends alerts."""

    @abstractmethod
    def notify(self, alert: Alert) -> None:
        """Send one alert. An error is logged, and the alert is sent again later."""


class LogNotifier(Notifier):
    """Writes alerts to the log of the daemon."""

    def notify(self, alert: Alert) -> None:
        """Log the alert as a warning."""
        dg.get_dagster_logger().warning(f"{alert.stream}: {alert.message}")


class WebhookNotifier(Notifier):
    """Posts JSON with `text`, which chat services show, and the fields of the alert to the webhook of the settings.

    Anyone who knows the URL can post to it. So it comes from the settings, not from this resource's configuration,
    which Dagster's page shows.
    """

    def notify(self, alert: Alert) -> None:
        """Post the alert, in up to three attempts.

        Raises:
            UsageError: the settings have no webhook any more.
            Unreachable: all attempts failed. The message leaves out the error of `requests`, which has the URL.
        """
        url = load_settings().alerts.webhook
        if url is None:
            raise UsageError(f"no webhook is set: set alerts.webhook in {CONFIGURATION}, or SILTSTONE_ALERTS__WEBHOOK")
        try:
            self._post(url, {"text": f"Siltstone, stream {alert.stream}: {alert.message}", **asdict(alert)})
        except requests.RequestException as error:
            status = error.response.status_code if error.response is not None else type(error).__name__
            raise Unreachable(f"the webhook failed ({status}): check alerts.webhook and the network") from None

    @retry(
        retry=retry_if_exception_type(requests.RequestException),
        stop=stop_after_attempt(3),
        wait=wait_exponential(multiplier=0.5),
        reraise=True,
    )
    def _post(self, url: str, body: dict[str, str]) -> None:
        requests.post(url, json=body, timeout=TIMEOUT_S).raise_for_status()

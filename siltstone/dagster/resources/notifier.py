"""Whom an alert is told: the log, or a webhook. A notifier of your own is a resource with a method `notify`."""

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
    """Something that a person should look at.

    Attributes:
        stream: of which stream.
        kind: what it is about: `proof`, `materialization` or `stream`.
        message: one line that says what is wrong.
        since: the moment it has been so, ISO 8601; part of what makes it one alert and not many.
    """

    stream: str
    kind: str
    message: str
    since: str


class Notifier(dg.ConfigurableResource, ABC):
    """Tells people."""

    @abstractmethod
    def notify(self, alert: Alert) -> None:
        """Tell of one alert; what it raises is logged, and the alert is told again later."""


class LogNotifier(Notifier):
    """Tells the log of the daemon."""

    def notify(self, alert: Alert) -> None:
        """A warning in the log."""
        dg.get_dagster_logger().warning(f"{alert.stream}: {alert.message}")


class WebhookNotifier(Notifier):
    """Posts JSON with `text`, which chat services show, and the fields of the alert, to the webhook of the settings.

    Anyone who knows the URL can post to it. So it is read from the settings and is not part of this resource's
    configuration, which Dagster's page shows.
    """

    def notify(self, alert: Alert) -> None:
        """Post it; three times, if need be.

        Raises:
            UsageError: there is no webhook any more.
            Unreachable: it was not taken. Says no more than how it failed: what requests says holds the URL.
        """
        url = load_settings().alerts.webhook
        if url is None:
            raise UsageError(
                f"there is no webhook: set alerts.webhook in {CONFIGURATION}, or SILTSTONE_ALERTS__WEBHOOK"
            )
        try:
            self._post(url, {"text": f"Siltstone, stream {alert.stream}: {alert.message}", **asdict(alert)})
        except requests.RequestException as error:
            status = error.response.status_code if error.response is not None else type(error).__name__
            raise Unreachable(f"the webhook did not take it ({status}): check alerts.webhook and the network") from None

    @retry(
        retry=retry_if_exception_type(requests.RequestException),
        stop=stop_after_attempt(3),
        wait=wait_exponential(multiplier=0.5),
        reraise=True,
    )
    def _post(self, url: str, body: dict[str, str]) -> None:
        requests.post(url, json=body, timeout=TIMEOUT_S).raise_for_status()

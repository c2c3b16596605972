"""Whom an alert is told: the log, or a webhook. A notifier of your own is a resource with a method `notify`."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass

import dagster as dg
import requests
from pydantic import Field
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_exponential

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
    """Posts JSON with `text`, which chat services show, and the fields of the alert."""

    url: str = Field(description="where to post; best given as EnvVar, as it may hold a secret")

    def notify(self, alert: Alert) -> None:
        """Post it; three times, if need be.

        Raises:
            requests.RequestException: it was not taken.
        """
        self._post({"text": f"Siltstone, stream {alert.stream}: {alert.message}", **asdict(alert)})

    @retry(
        retry=retry_if_exception_type(requests.RequestException),
        stop=stop_after_attempt(3),
        wait=wait_exponential(multiplier=0.5),
        reraise=True,
    )
    def _post(self, body: dict[str, str]) -> None:
        requests.post(self.url, json=body, timeout=TIMEOUT_S).raise_for_status()

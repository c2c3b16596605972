"""Clients of Kafka, and what their errors mean: the broker is away, or it refuses."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from siltstone.errors import StateError, Unreachable, UsageError
from siltstone.secret import Secret

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Producer
    from confluent_kafka.admin import AdminClient

EXTRA = ("kafka", "confluent_kafka", "a KafkaSink")
"""as `extras.check_extra` takes it"""
OWN = frozenset(
    {
        *("bootstrap.servers", "transactional.id", "enable.idempotence", "acks", "isolation.level", "group.id"),
        *("enable.auto.commit", "auto.offset.reset", "enable.partition.eof"),
        *("delivery.report.only.error", "on_delivery", "error_cb"),
    }
)
"""options that a sink sets itself"""
_DEFAULTS = {"log_level": 2, "reconnect.backoff.max.ms": 1000}
"""what is wrong is told by errors, and not on the standard error of the process"""
_PRODUCER = {"partitioner": "murmur2_random", "linger.ms": 5}
"""a key is in the partition where clients in Java, such as Spark, would put it"""
_PURGED = ("_PURGE_QUEUE", "_PURGE_INFLIGHT")
"""of records that were dropped because their transaction had failed"""
_FENCED = ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH", "INVALID_PRODUCER_ID_MAPPING")
_REFUSED = (
    *("TOPIC_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED", "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"),
    *("GROUP_AUTHORIZATION_FAILED", "SASL_AUTHENTICATION_FAILED", "_AUTHENTICATION", "_SSL", "TOPIC_EXCEPTION"),
    *("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE", "INVALID_RECORD", "INVALID_TIMESTAMP", "POLICY_VIOLATION"),
    *("INVALID_TRANSACTION_TIMEOUT", "UNSUPPORTED_VERSION", "UNSUPPORTED_FOR_MESSAGE_FORMAT", "_UNSUPPORTED_FEATURE"),
    *("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION"),
)
"""errors that come again, whatever the broker's health; all others may pass"""


@dataclass
class KafkaClients:
    """Makes the clients of one sink, and translates their errors.

    Attributes:
        what: the sink, as errors call it.
        servers: the value of `bootstrap.servers`.
        options: further options of the client (librdkafka).
    """

    what: str
    servers: str | Secret
    options: Mapping[str, Any]
    _noted: list["KafkaError"] = field(default_factory=list)
    """what the newest client was told of its connections"""
    _undelivered: list[tuple["KafkaError", str | None]] = field(default_factory=list)
    """why records could not be written, and to which topic"""

    def make_producer(self, transactional_id: str) -> "Producer":
        """Return a producer of transactions of this id."""
        from confluent_kafka import Producer

        self._undelivered.clear()
        return Producer(
            {
                **_PRODUCER,
                **self._config(),
                "transactional.id": transactional_id,
                "delivery.report.only.error": True,
                "on_delivery": lambda error, record: self._undelivered.append((error, record.topic())),
            }
        )

    def make_consumer(self) -> "Consumer":
        """Return a consumer of committed records, which belongs to no group."""
        from confluent_kafka import Consumer

        own = {"group.id": "siltstone", "enable.auto.commit": False, "isolation.level": "read_committed"}
        to_the_end = {"auto.offset.reset": "earliest", "enable.partition.eof": True, "fetch.wait.max.ms": 10}
        return Consumer({**self._config(), **own, **to_the_end})

    def make_admin(self) -> "AdminClient":
        """Return a client that asks for topics and their settings."""
        from confluent_kafka.admin import AdminClient

        return AdminClient(self._config())

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Translate errors of the clients in a `with` block.

        Raises:
            Unreachable: the broker is away, or another process has taken the transactions over: trying again decides.
            StateError: the broker refuses.
            UsageError: an option is wrong.
        """
        from confluent_kafka import KafkaException

        try:
            yield
        except KafkaException as caught:
            error: KafkaError = caught.args[0]
            # What a record was refused for, rather than that its transaction failed.
            first = next((each for each in self._undelivered if each[0].code() not in _codes(_PURGED)), (error, None))
            raise self._translate(*first) from caught

    def _translate(self, error: "KafkaError", topic: str | None) -> Exception:
        from confluent_kafka import KafkaError

        said = f"{self.what}: {f'a record of topic {topic}: ' if topic else ''}{_one_line(error)}"
        if error.code() == KafkaError._INVALID_ARG:  # noqa: SLF001 - so the client names its own errors
            return UsageError(f"{said}: correct its options")
        if error.code() in _codes(_FENCED):
            return Unreachable(
                f"{said}: another process delivers for this stream, or the transaction took longer than "
                "transaction.timeout.ms",
                advice="run again: what the topic has is not sent twice",
                transient=True,
            )
        if error.code() in _codes(_REFUSED):
            return StateError(said, advice="the broker refuses this: correct it there, or in the sink, and run again")
        seen = f" ({_one_line(self._noted[-1])})" if self._noted else ""
        return Unreachable(f"{said}{seen}", advice="check that the broker answers, and run again", transient=True)

    def _config(self) -> dict[str, Any]:
        self._noted.clear()
        given = {name: each.read() if isinstance(each, Secret) else each for name, each in self.options.items()}
        servers = self.servers.read() if isinstance(self.servers, Secret) else self.servers
        return {**_DEFAULTS, **given, "bootstrap.servers": servers, "error_cb": self._noted.append}


def is_missing_topic(error: "KafkaError") -> bool:
    """Whether an error says that a topic does not exist."""
    return error.code() in _codes(("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC"))


def _codes(names: tuple[str, ...]) -> set[int]:
    from confluent_kafka import KafkaError

    return {getattr(KafkaError, name) for name in names}


def _one_line(error: "KafkaError") -> str:
    return " ".join(f"{error.name()}: {error.str()}".split())

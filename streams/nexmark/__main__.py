"""Write NEXMark's events to topics of Kafka: `python -m streams.nexmark ADDRESS [--events N] [--rate N] [--seed N]`."""

import argparse
import sys

from siltstone.extras import require_extra

from .events import EPOCH, Events
from .kafka import TOPIC, write_topics


def main() -> None:
    """Write the next events."""
    parser = argparse.ArgumentParser(prog="python -m streams.nexmark", description="Write NEXMark's events to Kafka.")
    parser.add_argument("address", help="HOST:PORT of a broker")
    parser.add_argument(
        "--events", type=int, default=50_000, help=f"how many more, of all kinds, at least {EPOCH} (default: 50000)"
    )
    parser.add_argument("--rate", type=int, default=10_000, help="events per second of event time (default: 10000)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (default: 0)")
    options = parser.parse_args()
    if options.events < EPOCH or options.rate < 1:
        parser.error(f"--events must be at least {EPOCH}, and --rate at least 1")
    with require_extra("kafka", "confluent_kafka", "writing to Kafka"):
        from confluent_kafka import KafkaException
    try:
        written = write_topics(options.address, Events(options.seed, options.rate), options.events)
    except (KafkaException, TimeoutError) as error:
        sys.exit(
            f"cannot write all events to {options.address}: {error}; the same command goes on where the topics end"
        )
    except ValueError as error:
        sys.exit(str(error))
    for kind, count in written.items():
        print(f"{TOPIC.format(kind)}: {count:,} events")


if __name__ == "__main__":
    main()

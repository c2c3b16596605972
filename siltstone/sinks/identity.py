"""The name under which a sink in another system records what it has: its own, and never that of another sink."""

from siltstone.catalog.warehouse import OpenWarehouse


def sink_identity(warehouse: OpenWarehouse, stream: str, operator: str) -> str:
    """Return the name: that of the stream, and the operator.

    Raises:
        UnknownStream, Unreachable: see `stream_identity`.
    """
    return f"{stream_identity(warehouse, stream)}/{operator}"


def stream_identity(warehouse: OpenWarehouse, stream: str) -> str:
    """Return the name of all sinks of a stream: the warehouse's identity, the stream, and when it began.

    So streams of the same name in two warehouses have names of their own, and so has a stream that was deleted and
    began again, whose checkpoints have ids that the sink has seen before.

    Raises:
        UnknownStream: the stream has not begun.
        Unreachable: the catalog does not answer.
    """
    catalog = warehouse.catalog
    return f"{catalog.identity.read().identity}/{stream}/{catalog.streams.get(stream).incarnation}"

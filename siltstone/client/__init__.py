"""The client: one object per warehouse, one per stream, one method per operation.

    import siltstone as st

    warehouse = st.open("./warehouse")
    flights = warehouse.stream("flights")
    flights.run()
    flights.verify(every=True).failed

Nothing stays open between calls. A method opens the store and the catalog, does its work and returns one frozen
result; `to_json()` gives it as JSON. The command line, the jobs and Dagster call exactly these methods.
"""

from siltstone.client.stream import StreamClient
from siltstone.client.warehouse import Client, open_client, write_stream

__all__ = ["Client", "StreamClient", "open_client", "write_stream"]

"""The client: one object for a warehouse, one for each of its streams, one method for each operation.

    import siltstone as st

    warehouse = st.open("./warehouse")
    flights = warehouse.stream("flights")
    flights.run()
    flights.verify(every=True).failed

Nothing stays open between calls. A method opens the store and the catalog, does its work, and returns one frozen
result, which `to_json()` prints. The command line, the jobs and Dagster call exactly these methods.
"""

from siltstone.client.stream import StreamClient
from siltstone.client.warehouse import Client, open_client, write_stream

__all__ = ["Client", "StreamClient", "open_client", "write_stream"]

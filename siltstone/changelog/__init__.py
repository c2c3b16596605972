"""Make changes durable: the writer of the log, batched and hedged uploads, acknowledgements."""

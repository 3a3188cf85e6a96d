"""Training engines: one sharded model, and its optimizer, across the processes of a worker group."""

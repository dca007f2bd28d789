"""Transfer: how bytes move between processes. Sees floor 0 only."""

"""Index: how blocks are named and found. Sees floor 0 only."""

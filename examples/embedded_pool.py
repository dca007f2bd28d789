"""Use a pool inside one process."""

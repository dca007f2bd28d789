"""Client: the Pool interface over a server in another process."""

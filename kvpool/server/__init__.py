"""Server: the kvpool-server daemon."""

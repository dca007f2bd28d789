"""Command line: the kvpool command."""

"""Conductor: the HTTP front that sends each request to its workers."""

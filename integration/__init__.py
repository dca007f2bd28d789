"""Integration: engines' adapters, the runtime, the Conductor and kvpool-serve."""

"""Testing: conformance suites, fault wrappers and simulation. Imported by tests only."""

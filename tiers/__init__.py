"""Tiers: where blocks are kept. Sees floor 0 only."""

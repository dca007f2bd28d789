"""The cluster simulator: discrete events over the Conductor's planner, and the papers' figures."""

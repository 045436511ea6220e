"""The planner: memory, time and cost of a run, computed from its configuration without a GPU."""

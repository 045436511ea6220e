"""The tests of every part, what they share (helpers), and scripts that a person runs (tools)."""

"""Benchmarks, run from the repository root: `attention` beside its peers, `wan_step` for a whole step."""

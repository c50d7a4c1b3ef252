"""Measuring and showing: the demo, and later the benchmarks."""

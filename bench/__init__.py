"""Benchmarks: a load generator, a baseline to compare with, and one command that runs both."""

"""Prefect flows: the sequence of a run, nothing else."""

"""Prefect tasks: build objects from the config, call gyre_core, report."""

"""Gyre's system: everything but the Prefect flows and tasks. Never imports prefect."""

"""A discrete-event world that drives the real scheduling policies: what a schedule does before it is paid for."""

"""OpenTelemetry traces: one trace a rollout, one a step, across all processes of a run. Off by default."""

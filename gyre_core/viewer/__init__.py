"""Rollouts and runs as HTML pages for people: pure models, and one file each that holds all it needs."""

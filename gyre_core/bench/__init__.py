"""Measurements that `gyre bench NAME` runs: each prints the numbers a claim in docs/ rests on."""

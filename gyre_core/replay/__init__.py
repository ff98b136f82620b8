"""What a stored step can be made to tell again: checked, selected anew, graded anew, trained anew.

`stored.py` reads a step; `check.py`, `reselect.py`, `regrade.py` and `retrain.py` each answer one question about it.
Nothing here writes to a run's store.
"""

"""The parts of ``bench_step.py``: the work, and one program for each side that does it."""

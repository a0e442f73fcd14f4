"""Replays of the paper's evaluation, one module for each figure.

    python -m perf.experiments.figure_16 [--managers jenga vllm ...] [--save FOLDER]

Every module prints rows with the paper's numbers, ours and those of every baseline. With --save it
writes the rows of its replays as JSON lines, for `jenga plot` and `jenga report`.
"""

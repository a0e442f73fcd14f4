"""The paper's evaluation, replayed: one module for each of its figures.

    python -m perf.experiments.figure_16 [--managers jenga vllm ...] [--save FOLDER]

Every module prints the paper's numbers, ours and those of every baseline as rows, and with --save
keeps the rows of its replays as JSON lines, for `jenga plot` and `jenga report`.
"""

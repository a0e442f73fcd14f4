"""Rows of replays that never ran, with every byte accounted for."""

import math

from jenga.sim.results.rows import RunRow, Spread, StepRow, SummaryRow, TableBytes, write_rows

ARENA_BYTES = 10_000_000_000


def made_run(run="a", *, manager="jenga", model="ministral-8b-2410", trace="static", **fields):
    return RunRow(
        run=run,
        model=model,
        manager=manager,
        trace=trace,
        arena_bytes=ARENA_BYTES,
        gpu="H100-80G",
        num_requests=20,
        **fields,
    )


def made_steps(run="a", *, num_steps=100, waste=0.1):
    """An arena that fills, shifts from one page table to the other and empties."""
    for step in range(1, num_steps + 1):
        phase = step / num_steps
        held = int(ARENA_BYTES * math.sin(math.pi * phase) ** 0.5)
        useless, empty = int(held * waste * 0.7), int(held * waste * 0.3)
        used = held - useless - empty
        cached = (ARENA_BYTES - held) // 4
        share = 0.25 + 0.3 * phase
        tables = {
            name: TableBytes(
                used_bytes=int(used * part),
                useless_bytes=int(useless * part),
                empty_bytes=int(empty * part),
                cached_bytes=int(cached * part),
            )
            for name, part in (("full", share), ("sliding", 1 - share))
        }
        yield StepRow(
            run=run,
            step=step,
            time_s=0.05 * step,
            num_running=5,
            num_waiting=max(0, 20 - step // 5),
            num_decoding=round(6 * math.sin(math.pi * phase)),
            prefill_tokens=512,
            used_bytes=used,
            useless_bytes=useless,
            cached_bytes=cached,
            empty_bytes=empty,
            unallocated_bytes=ARENA_BYTES - held - cached,
            tables=tables,
        )


def made_summary(run="a", *, num_steps=100, waste=0.1, hit_rate=0.5, **fields):
    return SummaryRow(
        **{
            "run": run,
            "num_steps": num_steps,
            "seconds": 0.05 * num_steps,
            "num_requests": 20,
            "prompt_tokens": 1_000_000,
            "output_tokens": 1_500,
            "hit_tokens": int(1_000_000 * hit_rate),
            "hit_rate": hit_rate,
            "waste": waste,
            "mean_decode_batch": 5.39,
            "num_preemptions": 2,
            "evicted_pages": 17,
            "requests_per_s": 4.0,
            "tokens_per_s": 300.0,
            "ttft_s": Spread(p50=1.0, p90=2.0, p99=3.0, mean=1.2),
        }
        | fields
    )


def write_runs(path, *, waste_of=(("jenga", 0.001), ("vllm", 0.4))):
    """Two runs of one trace, one manager each."""
    for index, (manager, waste) in enumerate(waste_of):
        run, num_steps = f"run-{index}", 100 * (index + 1)
        rows = [
            made_run(run, manager=manager),
            *made_steps(run, num_steps=num_steps, waste=waste),
            made_summary(
                run, num_steps=num_steps, waste=waste, mean_decode_batch=5.39 / (index + 1)
            ),
        ]
        write_rows(path, rows)
    return path

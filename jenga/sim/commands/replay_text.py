"""Output of `jenga replay`: a table of counted numbers, one of modelled times, and a legend."""

from collections.abc import Iterator, Sequence

from jenga.eviction.known import DEFAULT_POLICY
from jenga.sim.drawing.text import aligned, bytes_text, wrapped
from jenga.sim.replays.session import Outcome, Trace
from jenga.sim.results.rows import RunRow, SummaryRow

_WIDTH = 100

_HIT_WORDS = '"hit %" is the share of prompt tokens that were found cached.'

_BOUND_WORDS = (
    'Two numbers of a cache that serves the requests one after another: "unlimited %" is "hit %" '
    'without evictions, and "at most %" an upper bound on it with any eviction in this arena. The '
    "bound may be out of reach, even for a policy that knows all requests. It counts no memory of "
    "requests that run at once or of prompts that are being read."
)

_TIME_WORDS = (
    "TTFT is the time to first token: seconds from arrival to it. TPOT is the time per output "
    "token after the first, in seconds. p50 is the median over requests."
)

_WASTE_WORDS = (
    '"waste %" is the share of held bytes that the next tokens do not need: the mean over steps in '
    'which a request decodes. "busy %" is the mean over those steps in which at least half as many '
    'requests decode as in the largest decode batch. "of bytes %" is the same share of the bytes '
    'summed over all steps in which a request decodes. "evicted" is the number of cached small '
    "pages that were lost."
)

_MISSED_WORDS = (
    '"tokens not found" sums the rows of kind miss: all tokens that admitted requests could have '
    'started from and did not, by reason. "cached" tokens lay in the cache, and no request could '
    "start from them."
)


def outcomes_text(found: Sequence[Outcome], trace: Trace, *, notes: Sequence[str] = ()) -> str:
    """Write a table of counted numbers, one of modelled times, and what their columns mean.

    Args:
        found: Replays that ended.
        trace: Their trace.
        notes: Further sentences for the end.
    """
    has_bounds = any("best_eviction_hit_rate" in each.row.options for each in found)
    counted = ["model", "manager", "arena", "hit %"]
    counted += ["unlimited %", "at most %"] if has_bounds else []
    counted += ["waste %", "busy %", "of bytes %", "evicted"]
    has_host = any("host_bytes" in each.row.options for each in found)
    counted += ["stored", "loaded"] if has_host else []
    counted += ["preempted", "refused"]
    timed = ["model", "manager", "decode batch", "steps"]
    timed += ["seconds", "requests/s", "tokens/s", "TTFT p50", "TPOT p50"]
    memory, speed = [counted], [timed]
    missed = [["model", "manager", "tokens not found", "tokens", "%"]]
    policies = {each.row.eviction for each in found if each.row.eviction}
    has_orders = bool(policies - {DEFAULT_POLICY}) or len(policies) > 1
    for each in found:
        row, summary = each.row, each.summary
        manager = _label(row, has_order=has_orders)
        bounds = ("unlimited_hit_rate", "best_eviction_hit_rate") if has_bounds else ()
        memory.append(
            [
                row.model,
                manager,
                bytes_text(row.arena_bytes),
                f"{100 * summary.hit_rate:.1f}",
                *(
                    f"{100 * row.options[name]:.1f}" if name in row.options else "-"
                    for name in bounds
                ),
                *map(_percent, (summary.waste, summary.busy_waste, summary.waste_of_bytes)),
                f"{summary.evicted_pages:,}",
                *map(bytes_text, (summary.stored_bytes, summary.loaded_bytes) if has_host else ()),
                f"{summary.num_preemptions:,}",
                f"{summary.num_refused:,}",
            ]
        )
        speed.append(
            [
                row.model,
                manager,
                f"{summary.mean_decode_batch:.2f}",
                f"{summary.num_steps:,}",
                f"{summary.seconds:,.1f}",
                f"{summary.requests_per_s:.3g}",
                f"{summary.tokens_per_s:,.0f}",
                f"{summary.ttft_s.p50:.3g}",
                f"{summary.tpot_s.p50:.3g}",
            ]
        )
        missed += [
            [row.model, manager, reason, f"{tokens:,}", f"{share:.1f}"]
            for reason, tokens, share in _missed(summary)
        ]
    seconds = dict.fromkeys(str(each.row.options["seconds"]) for each in found)
    legend = [_HIT_WORDS, *([_BOUND_WORDS] if has_bounds else []), _WASTE_WORDS]
    legend += _refusals(found, has_orders=has_orders)
    legend += [_TIME_WORDS, f"Seconds are modelled: {'; '.join(seconds)}."]
    if len(missed) > 1:
        legend.append(_MISSED_WORDS)
    if any(each.summary.waste is None for each in found):
        legend.append(
            "A dash means that no sampled step has a decoding request; give --every 1 to sample "
            "all steps."
        )
    return "\n".join(
        [
            f"{trace.num_requests:,} requests of {trace.name}",
            *aligned(memory, alignment="<<" + ">" * (len(counted) - 2)),
            "",
            *aligned(speed, alignment="<<" + ">" * (len(timed) - 2)),
            "",
            *([*aligned(missed, alignment="<<<>>"), ""] if len(missed) > 1 else []),
            *(line for note in [*legend, *notes] for line in wrapped(note, width=_WIDTH)),
        ]
    )


def _label(row: RunRow, *, has_order: bool) -> str:
    """Return the name of a replay's manager, with its policy and its options."""
    manager = f"{row.manager} {row.eviction}".strip() if has_order else row.manager
    return f"{manager} {row.options.get('stock', '')}".rstrip()


def _refusals(found: Sequence[Outcome], *, has_orders: bool) -> Iterator[str]:
    """Yield a sentence on refused requests, with the reasons, if any were refused."""
    refused = [each for each in found if each.summary.num_refused]
    if not refused:
        return
    reasons = [
        ", ".join(f"{reason} ({count:,})" for reason, count in each.summary.refusals.items())
        for each in refused
    ]
    labels = [f"{each.row.model} {_label(each.row, has_order=has_orders)}" for each in refused]
    parts = [f"{label}: {each}" for label, each in zip(labels, reasons, strict=True)]
    told = reasons[0] if len(set(reasons)) == 1 else "; ".join(parts)
    yield f'"refused" requests can never run, and their prompts count as not found: {told}.'


def _missed(summary: SummaryRow) -> Iterator[tuple[str, int, float]]:
    """Yield reason, tokens and percentage of the tokens not found, most tokens first."""
    tokens_of = summary.missed_tokens
    for reason in sorted(tokens_of, key=tokens_of.__getitem__, reverse=True):
        yield reason, tokens_of[reason], 100 * tokens_of[reason] / sum(tokens_of.values())


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"

"""What a Prometheus text says of the series of this backend, and whether its bytes add up."""

from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families

from jenga.vllm_plugin.metrics.series import SERIES

NAMES = {each.name for each in SERIES}


def samples_of(text):
    """Get the samples of our series: name -> [(labels, value)]."""
    samples = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in NAMES:
                samples[sample.name].append((sample.labels, sample.value))
    return samples


def total(samples, name, **labels):
    """Add the samples of a series that have these labels."""
    return sum(value for each, value in samples[name] if labels.items() <= each.items())


def check_sums(samples, *, engine="0"):
    """Check that every series of bytes or pages of an engine adds up to the whole."""
    of_engine = {
        name: [(labels, value) for labels, value in rows if labels["engine"] == engine]
        for name, rows in samples.items()
    }
    arena_bytes = total(of_engine, "jenga_arena_size_bytes")
    states = of_engine["jenga_arena_bytes"]
    assert arena_bytes > 0
    assert min(value for _, value in states) >= 0
    assert sum(value for _, value in states) == arena_bytes
    free = total(of_engine, "jenga_arena_bytes", state="free")
    null = total(of_engine, "jenga_arena_bytes", state="null")
    assert total(of_engine, "jenga_held_bytes") + free + null == arena_bytes
    for labels, held in of_engine["jenga_held_bytes"]:
        assert total(of_engine, "jenga_arena_bytes", table=labels["table"]) == held
    pages = {labels["state"]: value for labels, value in of_engine["jenga_large_pages"]}
    large_page_bytes = arena_bytes / sum(pages.values())
    assert pages["free"] * large_page_bytes == free
    assert pages["null"] * large_page_bytes == null
    assert (pages["held"] + pages["cached"]) * large_page_bytes == total(
        of_engine, "jenga_held_bytes"
    )
    if "jenga_host_bytes" in of_engine:
        assert total(of_engine, "jenga_host_bytes") == total(of_engine, "jenga_host_size_bytes") > 0
    return arena_bytes

"""Requests replayed against a memory manager without a GPU, to show how it uses memory.

`workload` makes or reads requests. `arenas` makes an arena of our manager or of a baseline.
`replays` runs requests through the arena under the scheduler of `batching`. `batching` also turns
steps into modelled seconds. `results` has the rows that a replay writes. An experiment in a few
lines:

    facts = known_model("gemma-3-27b")
    model, gpu = facts.spec(), GPUS["H200"]
    arena_bytes = memory_budget([facts], gpu).require_arena()
    requests = articles(num_articles=24, num_questions=8, article_tokens=30_000)
    arena = make_arena("jenga", model, arena_bytes)

    run = Replay(requests, arena, clock=StepTime(model, weights_of(facts), gpu))
    waste = [run.memory().waste for step in run if step.number % 32 == 0]
    hit_rate = run.hit_tokens / run.prompt_tokens

Tokens, pages and bytes are counted as an engine would have them. Seconds are those of a roofline.
"""

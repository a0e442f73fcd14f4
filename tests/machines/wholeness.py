"""What every checkpoint promises: all that a request needs to go on from there is cached."""

from ast import literal_eval

from jenga.policies import RequestFacts

FACTS = RequestFacts(prompt_tokens=1)


def assert_checkpoints_are_whole(manager, hash_tokens):
    """Every checkpoint of a text has all its pages, and nothing of it can go before it does.

    Hashes are those of `Run`, which say what text they are of.
    """
    tree = manager.prefix_cache.tree
    for node in tree._by_key.values():
        if not node.is_kept or not isinstance(node.key, bytes):
            continue
        tokens, named = literal_eval(node.key.decode())
        assert len(tokens) == node.num_tokens + tree.ahead_tokens
        hashes = [
            repr((tokens[:end], [each for each in named if each[0] < end])).encode()
            for end in range(hash_tokens, len(tokens) + 1, hash_tokens)
        ]
        for table in manager._tables:
            policy, grain = table.policy, table.grain
            if policy.names_images:
                continue
            if policy.is_overwritten:
                keys = [hashes[node.num_tokens // hash_tokens - 1]]
            elif table in tree._prefix_tables:
                pages = range(len(tokens) // grain.page_slots)
                keys = policy.content_keys(FACTS, hashes, grain, pages)
            else:
                pages = policy.reused_pages(FACTS, (), grain, node.num_tokens)
                span = range(pages[0], pages[-1] + 1) if pages else range(0)
                keys = policy.content_keys(FACTS, hashes, grain, span)
            for key in keys:
                page = table.page_of(key)
                assert page is not None, (table.spec.name, node.num_tokens, key)
                assert table.pins[page], (table.spec.name, node.num_tokens, key)

"""How requests come in: the queue that waits, what is left to the cache, pages taken or refused."""

"""The manager's records of running requests, page tables, and the content of pages."""

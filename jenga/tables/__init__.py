"""What the manager keeps of running requests, of page tables, and of the content of their pages."""

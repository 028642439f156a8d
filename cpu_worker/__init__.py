"""The CPU worker: the paged KV cache and attention over it."""

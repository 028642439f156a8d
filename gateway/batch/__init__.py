"""Offline batches in OpenAI's JSONL format: many prompts in, one record for each out."""

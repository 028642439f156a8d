"""The throughput model and every decision that follows from it."""

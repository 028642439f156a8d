"""Throughput measured through the gateway, beside what was predicted for the same requests."""

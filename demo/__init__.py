"""The shipped demonstration model: a small Mixtral trained on public-domain Shakespeare."""

"""MoE-Lens for clients: the generated API (`moelens.v1`)."""

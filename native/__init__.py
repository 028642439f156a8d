"""C kernels and the shared-memory channel, bound with cffi."""

"""Names of limits as a person would say them."""

_LIMITS = {
    "kv_capacity": "KV capacity",
    "gpu": "GPU compute",
    "device": "GPU compute",
    "link": "link to the GPU",
    "link_d2h": "link from the GPU",
    "attention": "CPU attention",
    "host_memory": "host memory bandwidth",
    "head": "output head",
    "overhead": "scheduling",
}


def limit_text(limit: str) -> str:
    """A limit's name as a person would say it."""
    return _LIMITS.get(limit, limit)

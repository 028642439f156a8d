"""docs/metrics.md names every series that a gateway has, with its kind and labels, and no other."""

import re

from prometheus_client.registry import CollectorRegistry

from gateway.metrics import Metrics
from tests.servers import REPOSITORY

ROW = re.compile(r"^\| `(moe_lens_\w+)(?:\{(\w+)\})?` \| (\w+) \|", re.MULTILINE)


def served(registry: CollectorRegistry) -> set[tuple[str, str, str]]:
    """(name as it is exposed, label, kind) of each series."""
    found = set()
    for collector in registry._collector_to_names:
        (family,) = collector.describe()
        name = family.name + ("_total" if family.type == "counter" else "")
        label = ",".join(getattr(collector, "_labelnames", ()))
        found.add((name, label, family.type))
    return found


def test_the_table_is_complete() -> None:
    documented = set(ROW.findall((REPOSITORY / "docs" / "metrics.md").read_text()))
    assert documented == served(Metrics().registry)

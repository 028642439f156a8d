"""Write the Grafana dashboard: python deploy/grafana/generate.py"""

import json
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parent / "dashboards" / "moe-lens.json"
RATE = "[$__rate_interval]"

# Title, unit, and the series: legend and expression.
PANELS: list[tuple[str, str, list[tuple[str, str]]]] = [
    (
        "Throughput: predicted and actual",
        "tokens/s",
        [
            ("predicted, {{kind}}", "moe_lens_predicted_tokens_per_second"),
            ("actual, {{kind}}", "moe_lens_actual_tokens_per_second"),
        ],
    ),
    (
        "Device time by cause",
        "percentunit",
        [
            ("busy", f"rate(moe_lens_device_busy_seconds_total{RATE})"),
            ("idle, {{cause}}", f"rate(moe_lens_device_idle_seconds_total{RATE})"),
        ],
    ),
    ("KV cache in use", "percentunit", [("share", "moe_lens_kv_cache_usage_perc")]),
    (
        "Requests",
        "short",
        [
            ("running", "moe_lens_num_requests_running"),
            ("waiting", "moe_lens_num_requests_waiting"),
        ],
    ),
    (
        "Limits: bytes moved",
        "Bps",
        [
            ("weights to the device", f"rate(moe_lens_weight_stream_bytes_total{RATE})"),
            ("KV read by CPU attention", f"rate(moe_lens_cpu_attention_bytes_total{RATE})"),
        ],
    ),
    (
        "Time to first token",
        "s",
        [
            (
                f"p{q}",
                f"histogram_quantile(0.{q}, "
                f"rate(moe_lens_time_to_first_token_seconds_bucket{RATE}))",
            )
            for q in (50, 99)
        ],
    ),
    (
        "Between tokens",
        "s",
        [
            (
                f"p{q}",
                f"histogram_quantile(0.{q}, "
                f"rate(moe_lens_inter_token_latency_seconds_bucket{RATE}))",
            )
            for q in (50, 99)
        ],
    ),
    (
        "Preemptions and recoveries",
        "short",
        [
            ("preemptions/s", f"rate(moe_lens_num_preemptions_total{RATE})"),
            ("recoveries", "moe_lens_num_recoveries_total"),
        ],
    ),
]


def panel(index: int) -> dict[str, Any]:
    """A time series in a grid of two columns."""
    title, unit, series = PANELS[index]
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "moe-lens"},
        "gridPos": {"x": 12 * (index % 2), "y": 8 * (index // 2), "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "legendFormat": legend, "expr": expression}
            for i, (legend, expression) in enumerate(series)
        ],
    }


def dashboard() -> dict[str, Any]:
    """The whole dashboard."""
    return {
        "uid": "moe-lens",
        "title": "MoE-Lens",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "panels": [panel(index) for index in range(len(PANELS))],
    }


if __name__ == "__main__":
    OUTPUT.write_text(json.dumps(dashboard(), indent=2) + "\n")

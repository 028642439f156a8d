"""What the gateway counts, under the names that dashboards for such engines already use.

Prefix moe_lens_; vLLM's suffixes where the meaning is the same. Clocks of different processes are
never compared: the worker sends durations.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator

from moelens.v1.gpu_worker_pb2 import StepTimes
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from gateway.admission import Plan
from gateway.generation import Generation
from planner.scheduler import Scheduler, Step
from protos import transport

FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
SLOW_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
# Throughput is what the last seconds of work gave.
WINDOW_S = 10.0


class Throughput:
    """Tokens per second over the last `WINDOW_S`, time without work not counted."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, int, int]] = deque()  # end, duration, tokens, new

    def add(self, duration_s: float, tokens: int, generated: int, now: float) -> None:
        """One step's share."""
        self._steps.append((now, duration_s, tokens, generated))
        while now - self._steps[0][0] > WINDOW_S:
            self._steps.popleft()

    def rates(self, now: float) -> tuple[float, float]:
        """(all tokens, generated tokens) per second of work; zeros after a window without any."""
        # Copied first: the metrics server reads from a thread of its own.
        recent = [step for step in list(self._steps) if now - step[0] <= WINDOW_S]
        busy_s = sum(step[1] for step in recent)
        if busy_s <= 0:
            return 0.0, 0.0
        return sum(step[2] for step in recent) / busy_s, sum(step[3] for step in recent) / busy_s


class Metrics:
    """All series of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.throughput = Throughput()
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._last_preemptions = 0

        def name(suffix: str) -> str:
            return f"moe_lens_{suffix}"

        def gauge(suffix: str, text: str, *labels: str) -> Gauge:
            return Gauge(name(suffix), text, labels, registry=registry)

        def counter(suffix: str, text: str, *labels: str) -> Counter:
            return Counter(name(suffix), text, labels, registry=registry)

        def histogram(suffix: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name(suffix), text, buckets=buckets, registry=registry)

        self.running = gauge("num_requests_running", "Sequences that hold KV")
        self.waiting = gauge("num_requests_waiting", "Sequences in the queue")
        self.kv_usage = gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1")
        self.prompt = counter("prompt_tokens", "Prompt tokens computed, repeats included")
        self.generation = counter("generation_tokens", "Tokens generated")
        self.success = counter("request_success", "Outputs finished", "finished_reason")
        self.failure = counter("request_failure", "Requests that failed", "code")
        self.first_token = histogram("time_to_first_token_seconds", "From arrival", SLOW_S)
        self.inter_token = histogram("inter_token_latency_seconds", "Between tokens", FAST_S)
        self.latency = histogram("e2e_request_latency_seconds", "From arrival to end", SLOW_S)
        self.queue_time = histogram("request_queue_time_seconds", "Until first scheduled", SLOW_S)
        self.step_tokens = histogram("iteration_tokens_total", "Tokens of a step", TOKENS)
        self.preemptions = counter("num_preemptions", "Sequences whose KV was given up")
        self.recoveries = counter("num_recoveries", "Sessions with the GPU worker that were lost")
        self.step_time = histogram("iteration_seconds", "Duration of a step", FAST_S)
        self.idle = counter("device_idle_seconds", "Device idle, by cause", "cause")
        self.device = counter("device_busy_seconds", "Device busy")
        self.attention = counter("cpu_attention_seconds", "CPU attention busy")
        self.kv_read = counter("cpu_attention_bytes", "KV bytes read by CPU attention")
        self.streamed = counter("weight_stream_bytes", "Weight bytes streamed to the device")
        self.link = counter("weight_stream_seconds", "Time in which weights were streamed")
        self.predicted = gauge("predicted_tokens_per_second", "By the planner", "kind")
        self.actual = gauge("actual_tokens_per_second", "Over the last seconds of work", "kind")

    def token(self, generation: Generation, now: float) -> None:
        """A token is about to be given to its sequence."""
        self.generation.inc()
        self.generated_tokens += 1
        if generation.last_token_at is None:
            self.first_token.observe(now - generation.submitted_at)
        else:
            self.inter_token.observe(now - generation.last_token_at)

    def finished(self, generation: Generation, reason: str, now: float) -> None:
        """An output is complete."""
        self.success.labels(finished_reason=reason).inc()
        self.latency.observe(now - generation.submitted_at)
        if generation.started_at is not None:
            self.queue_time.observe(generation.started_at - generation.submitted_at)

    def step_done(self, step: Step, times: StepTimes, wall_s: float, scheduler: Scheduler) -> None:
        """One step's result was applied; `wall_s` since the one before it, or since its plan."""
        now = time.monotonic()
        generated = sum(chunk.samples for chunk in step.chunks)
        computed = step.token_count - step.decode_count
        self.prompt.inc(computed)
        self.prompt_tokens += computed
        self.throughput.add(wall_s, computed + generated, generated, now)
        self.step_tokens.observe(step.token_count)
        self.step_time.observe(times.total_s)
        self.idle.labels(cause="link").inc(times.idle_link_s)
        self.idle.labels(cause="attention").inc(times.idle_attention_s)
        self.idle.labels(cause="other").inc(times.idle_other_s)
        self.idle.labels(cause="nothing_to_do").inc(times.wait_for_plan_s)
        self.device.inc(times.device_s)
        self.attention.inc(times.attention_s)
        self.kv_read.inc(times.kv_read_bytes)
        self.streamed.inc(times.weights_streamed_bytes)
        self.link.inc(times.link_s)
        self._observe_preemptions(scheduler)

    def _observe_preemptions(self, scheduler: Scheduler) -> None:
        total = scheduler.num_preemptions
        # A new scheduler counts from zero again.
        before = self._last_preemptions if total >= self._last_preemptions else 0
        self.preemptions.inc(total - before)
        self._last_preemptions = total

    def watch(self, scheduler: Callable[[], Scheduler | None], plan: Callable[[], Plan]) -> None:
        """Read what is a state, not an event, at the moment when somebody looks."""

        def of_scheduler(read: Callable[[Scheduler], float]) -> Callable[[], float]:
            def value() -> float:
                now = scheduler()
                return 0.0 if now is None else read(now)

            return value

        self.running.set_function(of_scheduler(lambda s: s.running))
        self.waiting.set_function(of_scheduler(lambda s: s.waiting))
        self.kv_usage.set_function(of_scheduler(lambda s: s.pool.used_blocks / s.pool.total_blocks))
        rates = self.throughput.rates
        self.actual.labels(kind="all").set_function(lambda: rates(time.monotonic())[0])
        self.actual.labels(kind="generated").set_function(lambda: rates(time.monotonic())[1])
        nan = float("nan")  # not predicted is not zero
        self.predicted.labels(kind="all").set_function(
            lambda: nan if plan().tokens_per_s is None else plan().tokens_per_s or 0.0
        )
        self.predicted.labels(kind="generated").set_function(
            lambda: (
                nan
                if plan().generated_tokens_per_s is None
                else plan().generated_tokens_per_s or 0.0
            )
        )


@contextlib.contextmanager
def metrics_server(metrics: Metrics, listen: str | None) -> Iterator[None]:
    """Prometheus' text format over HTTP at host:port; nothing when `listen` is None.

    Raises ValueError or OSError when the address is none, or taken.
    """
    if listen is None:
        yield
        return
    host, _, port = transport.check_address(listen).rpartition(":")
    if not host or host.startswith("unix"):
        raise ValueError(f"metrics_listen {listen!r} is not host:port")
    server, thread = start_http_server(int(port), host.strip("[]"), registry=metrics.registry)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

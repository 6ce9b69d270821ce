"""Metrics of steps, grammars, experts and preemptions, from the engine's newest gauges."""

from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tiercel.server.metrics.labelled import labelled_counter
from tiercel.values.outcome import ExpertGauges, Gauges, GrammarGauges
from tiercel.values.plan import PreemptionReason


class StepMetrics(Collector):
    """The metrics of steps, grammars, experts and preemptions.

    Totals come from the engine and restart with it, as Prometheus allows.
    """

    def __init__(self) -> None:
        self._gauges = Gauges()

    def on_step(self, gauges: Gauges) -> None:
        """Store the newest gauges of the engine."""
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        """Yield the families of one frozen snapshot; may run in another thread."""
        gauges = self._gauges
        yield CounterMetricFamily("tiercel_steps", "Steps committed.", gauges.steps)
        yield CounterMetricFamily("tiercel_nano_batches", "Nano-batches of the committed steps.", gauges.nano_batches)
        yield CounterMetricFamily(
            "tiercel_engine_out_of_memory", "Steps for which the device had too little memory.", gauges.out_of_memory
        )
        yield GaugeMetricFamily(
            "tiercel_engine_threads",
            "Threads that compute together; fewer while other processes use the cores, 0 on a GPU.",
            gauges.threads,
        )
        yield from _grammars(gauges.grammars)
        yield from _experts(gauges.experts)
        yield from _preemptions(gauges)
        if gauges.switches:
            yield from _switches(gauges)


def _grammars(gauges: GrammarGauges) -> Iterator[Metric]:
    yield labelled_counter(
        "grammars",
        "Compilations of grammars by the engine, by result.",
        "result",
        (("compiled", gauges.compiled), ("failed", gauges.failed)),
    )
    yield CounterMetricFamily(
        "tiercel_grammar_compile_seconds", "Seconds spent compiling grammars, beside the steps.", gauges.compile_s
    )
    yield CounterMetricFamily(
        "tiercel_grammar_hits", "Requests whose grammar the engine had compiled before.", gauges.hits
    )
    yield CounterMetricFamily(
        "tiercel_grammar_masks", "Masks computed, one for each token of a constrained sequence.", gauges.masks
    )
    yield CounterMetricFamily(
        "tiercel_grammar_mask_seconds", "Seconds spent computing masks, within the steps.", gauges.mask_s
    )


def _experts(gauges: ExpertGauges) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "tiercel_expert_slots", "Experts that fit in the memory of --expert-memory; 0 without it.", gauges.slots
    )
    yield GaugeMetricFamily(
        "tiercel_experts_tiered",
        "Experts of all layers, in memory or on the SSD; 0 without --expert-memory.",
        gauges.experts,
    )
    yield GaugeMetricFamily("tiercel_expert_memory_bytes", "Memory of these slots.", gauges.memory_bytes)
    yield labelled_counter(
        "expert_uses",
        "Experts that a layer of a step needed: in memory (hit) or not (miss).",
        "result",
        (("hit", gauges.hits), ("miss", gauges.misses)),
    )
    yield CounterMetricFamily(
        "tiercel_experts_fetched_ahead", "Experts that were fetched because of a prediction.", gauges.fetched_ahead
    )
    yield CounterMetricFamily(
        "tiercel_expert_fetched_bytes", "Bytes of experts read from the SSD.", gauges.fetched_bytes
    )
    yield CounterMetricFamily("tiercel_expert_evictions", "Experts that lost their slot.", gauges.evictions)
    yield CounterMetricFamily("tiercel_expert_stalls", "Times that a step waited for an expert.", gauges.stalls)
    yield CounterMetricFamily("tiercel_expert_stall_seconds", "Seconds that steps waited for experts.", gauges.stall_s)
    yield GaugeMetricFamily(
        "tiercel_expert_tier_off", "1 if no folder could be used for experts, so that all are in memory.", gauges.off
    )


def _preemptions(gauges: Gauges) -> Iterator[Metric]:
    yield labelled_counter(
        "preemptions",
        "Preemptions by mode.",
        "mode",
        (("swap", gauges.preemptions_swap), ("recompute", gauges.preemptions_recompute)),
    )
    yield labelled_counter(
        "preemptions_by_reason",
        "Preemptions by who benefited: a higher band, a tenant owed service or memory, or the running sequences.",
        "reason",
        ((reason, gauges.preemptions_by_reason.get(reason, 0)) for reason in get_args(PreemptionReason)),
    )
    yield CounterMetricFamily(
        "tiercel_swapped_tokens", "Tokens restored from another tier after a preemption.", gauges.swapped_tokens
    )
    yield CounterMetricFamily(
        "tiercel_recomputed_tokens", "Tokens recomputed after a preemption.", gauges.recomputed_tokens
    )


def _switches(gauges: Gauges) -> Iterator[Metric]:
    """Yield the predicted and the measured cost of preemptions."""
    switches = gauges.switches
    yield labelled_counter(
        "switches_over", "Preempted sequences that have resumed.", "mode", ((one.mode, one.count) for one in switches)
    )
    yield labelled_counter(
        "switch_predicted_seconds",
        "Predicted seconds of copying and computing of their preemptions.",
        "mode",
        ((one.mode, one.predicted_s) for one in switches),
    )
    yield labelled_counter(
        "switch_realised_seconds",
        "Measured seconds of copying and computing of their preemptions.",
        "mode",
        ((one.mode, one.realised_s) for one in switches),
    )

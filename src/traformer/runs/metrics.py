"""The registry of metrics: what each number is called, how it is written, drawn and compared. Free of torch.

Tables, plots and the page of `tra report` iterate over METRICS: a new metric is one entry here, and its measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Format = Literal["percent", "rate", "number", "count", "share"]
Scale = Literal["share", "log", "linear"]
Better = Literal["higher", "lower", "neither"]

# Sections of a report, in order: name -> heading.
SECTIONS = {
    "accuracy": "Accuracy by length",
    "text": "Text",
    "stretch": "Far beyond training",
    "inside": "Inside the attention",
    "training": "Training",
}


@dataclass(frozen=True)
class Metric:
    """One kind of number.

    along     what it is plotted against: "length", or a coordinate of its measurements ("place", "distance", "step")
    scale     of the axis: "share" is 0 to 1, "log" and "linear" fit the values
    headline  whether it is drawn at the top of its section; the others are in a part that opens
    of_head   "reading" or "marking": of all heads' values the one of that head is drawn (traformer.evaluation.heads)
    not_of_bytes  whether a text read as bytes has better measures, so that it is no headline there
    """

    name: str
    label: str
    summary: str
    section: str = "accuracy"
    format: Format = "number"
    scale: Scale = "linear"
    better: Better = "neither"
    has_chance: bool = False
    along: str = "length"
    headline: bool = True
    of_head: str = ""
    not_of_bytes: bool = False

    def text(self, value: float | None) -> str:
        """The value as people read it; nothing for no value."""
        if value is None:
            return ""
        if self.format == "percent":
            return f"{100 * value:.1f} %"
        if self.format == "rate":
            return f"{value:.2e}"
        if self.format == "count":
            return f"{value:,.0f}"
        return f"{value:.3f}" if self.format == "share" else f"{value:.4g}"

    def interval(self, low: float | None, high: float | None) -> str:
        """The interval beside a value; of a rate only its upper bound, since the lower one is 0."""
        if low is None or high is None:
            return ""
        if self.format == "percent":
            return f"{100 * low:.1f}–{100 * high:.1f}"
        if self.format == "rate" and low == 0:
            return f"< {high:.1e}"
        return f"{self.text(low)}–{self.text(high)}"

    def value_and_interval(self, value: float | None, low: float | None = None, high: float | None = None) -> str:
        """ "98.4 % (94.5–99.6)"."""
        interval = self.interval(low, high)
        return f"{self.text(value)} ({interval})" if interval and value is not None else self.text(value)

    @property
    def direction(self) -> str:
        """ "higher is better", or nothing."""
        return "" if self.better == "neither" else f"{self.better} is better"


_ALL = (
    Metric(
        "exact_match", "exact match", "Every answer token of a sequence is right.",
        format="percent", scale="share", better="higher", has_chance=True,
    ),
    Metric(
        "token_accuracy", "token accuracy", "Share of answer tokens that are right.",
        format="percent", scale="share", better="higher", has_chance=True, headline=False,
    ),
    Metric(
        "error_per_read", "error per read", "Wrong answers per read, with a 95 % upper bound.",
        format="rate", scale="log", better="lower", headline=False,
    ),
    Metric(
        "bits_per_byte", "bits per byte", "Loss of the text in bits, per byte of it.",
        section="text", scale="log", better="lower",
    ),
    Metric(
        "word_perplexity", "perplexity per word", "exp(loss of the text per word and line end).",
        section="text", scale="log", better="lower", not_of_bytes=True,
    ),
    Metric(
        "perplexity", "perplexity per token", "exp(mean loss per token).",
        section="text", scale="log", better="lower", headline=False,
    ),
    Metric(
        "loss_by_place", "loss by place in the window", "Mean loss in nats of the tokens at these places of a window.",
        section="text", scale="linear", better="lower", along="place",
    ),
    Metric(
        "loss_by_recurrence", "loss by distance of recurrence",
        "Mean loss in nats of the tokens that follow four tokens which stood in the text before, last so far back.",
        section="text", scale="linear", better="lower", along="distance",
    ),
    Metric(
        "recall_at_depth", "recall of a planted fact",
        "Share of facts planted at this depth (0: the start of the text, 1: its end) that are recalled word for word.",
        section="text", format="percent", scale="share", better="higher", along="depth",
    ),
    Metric(
        "prefill_speed", "tokens per CPU second, reading", "Tokens of a prompt per second of processor time.",
        section="stretch", format="count", scale="log", better="higher", headline=False,
    ),
    Metric(
        "decode_speed", "tokens per CPU second, writing", "Tokens decoded one by one per second of processor time.",
        section="stretch", format="count", scale="log", better="higher", headline=False,
    ),
    Metric(
        "keys_read", "keys read per query", "Mean over the queries of the last chunk, all layers and heads.",
        section="stretch", format="count", scale="log", better="lower",
    ),
    Metric(
        "keys_read_most", "most keys read by a query", "Of the queries of the last chunk, in any layer and head.",
        section="stretch", format="count", scale="log", better="lower", headline=False,
    ),
    Metric(
        "keys_kept", "keys kept per query", "Keys that scored above the threshold, mean over the last chunk.",
        section="stretch", format="count", scale="log", headline=False,
    ),
    Metric(
        "microseconds_per_token", "time per token (µs)", "Wall clock over all tokens read.",
        section="stretch", scale="log", better="lower",
    ),
    Metric(
        "cpu_microseconds_per_token", "CPU time per token (µs)", "Processor time of all threads.",
        section="stretch", scale="log", better="lower", headline=False,
    ),
    Metric(
        "source_weight", "weight on the source", "Weight of the reading head on the keys that decide the answer.",
        section="inside", format="share", scale="share", better="higher", of_head="reading",
    ),
    Metric(
        "residue", "residue", "Weight of the reading head on keys that the task makes irrelevant.",
        section="inside", format="share", scale="share", better="lower", of_head="reading",
    ),
    Metric(
        "lifted_pairs", "lifted pairs",
        "Of all pairs of a key with a negative and one with a positive content score, the share in which the negative"
        " one weighs more.",
        section="inside", format="percent", scale="share",
    ),
    Metric(
        "lift_in_nats", "lift in nats", "By how much the negative key of a lifted pair outweighs the positive one.",
        section="inside", headline=False,
    ),
    Metric(
        "lifted_by_distance", "lifted pairs by distance", "Lifted pairs whose negative key is this far from the query.",
        section="inside", format="percent", scale="share", along="distance",
    ),
    Metric(
        "marks", "weight on the key before the source",
        "What the marking head puts on the key before the source when the source is the query.",
        section="inside", format="share", scale="share", headline=False, of_head="marking",
    ),
    Metric(
        "positive_keys", "keys with a positive score", "Share of keys whose content score is above 0: what TRA keeps.",
        section="inside", format="share", scale="share", headline=False, of_head="reading",
    ),
    Metric(
        "gate_decay", "what a kept key leaves of a weight", "Mean of the gate over the queries.",
        section="inside", format="share", scale="share", headline=False, of_head="reading",
    ),
    Metric(
        "training_loss", "training loss", "Mean since the last logged step, in nats per answer token.",
        section="training", scale="log", better="lower", along="step",
    ),
    Metric(
        "training_accuracy", "training accuracy", "Share of answer tokens right while training.",
        section="training", format="percent", scale="share", better="higher", along="step", headline=False,
    ),
)  # fmt: skip

METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}


def metric_named(name: str) -> Metric:
    """The entry of a name; a name that another version wrote is shown as it is, so that nothing is lost."""
    return METRICS.get(name) or Metric(name, name.replace("_", " "), "", headline=False)

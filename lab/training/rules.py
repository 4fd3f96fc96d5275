"""What may not go together in one run, feature by feature: a condition, and what is said where it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lab.core.errors import RequestError, nearest
from lab.core.hooks import HOOK_POINTS, HookIntervention, LossTerm, Predictions, WeightIntervention
from lab.core.schema import leaves
from lab.interventions.experts import Experts
from lab.model.low_precision import PRECISIONS as LOW_PRECISIONS
from lab.optim.links import Link

FEWEST_BITS = 2  # of precision=mantissa, as many as E5M2 stores
# Switches of fp8, MX and NVFP4, with the value that switches each off.
SWITCHES = {
    "gradient_format": "e5m2",
    "stochastic_rounding": "none",
    "norm_gains": "fp32",
    "kept_in_bf16": "none",
    "attention_precision": "bf16",
    "weight_gradients": "rounded",
}
CUSTOM_MODELS_HAVE = ("logits", *(field for field in Predictions._fields if field not in ("hidden_rbtd", "routes")))


def check(config: Any) -> None:
    """Check that all parts of a ``RunConfig`` go together.

    Raises:
        RequestError: two of them do not, or one would change nothing.
    """
    for faults in (_of_interventions, _of_batches, _of_responses, _of_links, _of_precision, _of_custom_model):
        for message in faults(config):
            raise RequestError(message)


def _of_interventions(c: Any) -> Iterator[str]:
    for name, entry in c.intervention.items():
        for other in getattr(entry, "excludes", ()):
            if other in c.intervention:
                yield f"interventions {name} and {other} exclude each other; choose one of the two"
        for other in getattr(entry, "requires", ()):
            if other not in c.intervention:
                yield f"intervention {name} acts on {other}, which the run lacks; say intervention=[{other},{name}]"
        if isinstance(entry, HookIntervention):
            yield from _unknown(f"intervention {name} attaches to", entry.hook_points, HOOK_POINTS, c)
            if c.seq_len > entry.most_positions:
                yield (
                    f"intervention {name} has {entry.most_positions} positions, fewer than seq_len {c.seq_len}; "
                    f"say intervention.{name}.positions={c.seq_len}"
                )
        if isinstance(entry, Experts) and entry.fair_share(c.rows * c.seq_len) * entry.capacity < 1:
            places = entry.fair_share(c.rows * c.seq_len) * entry.capacity
            yield (
                f"intervention.{name}.capacity={entry.capacity:g} leaves an expert {places:g} places in a batch, less "
                f"than one token; say intervention.{name}.capacity=1.25"
            )
        if isinstance(entry, WeightIntervention) and c.custom_model:
            yield (
                f"intervention {name} acts on weights by their role, which weights of a custom model lack; "
                "say intervention=[]"
            )
        if isinstance(entry, LossTerm):
            yield from _unknown(f"loss term {name} uses", entry.uses, Predictions._fields, c)


def _unknown(clause: str, names: Iterable[str], possible: Sequence[str], c: Any) -> Iterator[str]:
    for name in names:
        if name not in possible:
            yield f"{clause} {name!r}; {nearest(name, possible)}"
        if c.custom_model and name not in CUSTOM_MODELS_HAVE:
            has = ", ".join(name for name in possible if name in CUSTOM_MODELS_HAVE)
            yield f"{clause} {name}; a custom model has {has} only, so say intervention=[]"


def _of_batches(c: Any) -> Iterator[str]:
    if c.batch:
        c.batch.entry.micro_batches(c.batch_size, c.steps)
        for name in {"router_bias"} & {*c.intervention}:
            yield f"intervention {name} learns from one forward pass a step, and batch={c.batch.name} takes several"
    elif "noise_scale" in c.probes.names:
        yield "probe noise_scale compares micro-batches, and the run has none; add batch=constant"
    if c.adaptive and c.schedule.over == "steps":
        yield "batch=adaptive ends after a number of tokens, not of steps; add schedule.over=tokens"
    for group in ("bad_batches", "response", "restarts", "loss_scale"):
        if c.batch and c.batch.name != "constant" and (entry := getattr(c, group)):
            takes = f"{group}={entry.name} takes batches of one size, not batch={c.batch.name}"
            yield f"{takes}; leave batch= out or say batch=constant"


def _of_responses(c: Any) -> Iterator[str]:
    if c.bad_batches:
        c.bad_batches.entry.check(c.steps)
    for key, entry in (("restarts", c.restarts), ("response", c.response and c.response.entry)):
        if entry and entry.resets_loss_scale and c.loss_scale is None:
            name = getattr(c, key).name
            yield f"{key}={name} resets the loss scale, and the run has none; add loss_scale=metaseq"
    if c.response is None:
        return
    name, response = c.response.name, c.response.entry
    if objection := response.objection(c):
        yield objection
    if isinstance(response, HookIntervention) and c.custom_model:
        yield f"response={name} attaches to hook points that a custom model lacks"
    if c.restarts:
        yield f"restarts={c.restarts.name} and response={name} both act; choose one"


def _of_links(c: Any) -> Iterator[str]:
    for name, link in c.optimizer.links.items():
        if reason := link.objection(c):
            yield f"optimizer.chain: {name!r} {reason}"
        if c.custom_model and link.roles != Link.roles:
            yield f"optimizer.chain: {name!r} acts on weights by their role, which a custom model lacks"
        if link.events and c.batch:
            yield (
                f"optimizer.chain: {name!r} reads the forward pass of a step, and batch={c.batch.name} takes several; "
                "leave batch= out"
            )


def _of_precision(c: Any) -> Iterator[str]:
    is_low = c.precision in LOW_PRECISIONS
    if c.gradient_sum != "fp32" and not (c.batch and c.loss_scale and c.precision == "fp16_emulated"):
        yield (
            f"gradient_sum={c.gradient_sum} sums scaled gradients of micro-batches in fp16; "
            "say batch=constant loss_scale=torch precision=fp16_emulated, too"
        )
    if c.master_weights == "none" and c.precision == "fp32":
        yield "master_weights=none keeps weights in the precision of products; say precision=bf16, too"
    if c.master_weights == "none" and is_low:
        yield f"precision={c.precision} keeps weights in fp32; leave out master_weights=none"
    for key, off in SWITCHES.items():
        if not is_low and (value := getattr(c, key)) != off:
            yield f"{key}={value} changes nothing in precision={c.precision}; say precision=mxfp8, too"
    if c.gradient_format != "e5m2" and c.precision in ("mxfp4", "nvfp4"):
        yield f"precision={c.precision} rounds gradients to E2M1; leave out gradient_format"
    if c.weight_gradients != "rounded" and c.precision not in ("mxfp8", "mxfp4"):
        yield f"weight_gradients={c.weight_gradients} is for MX, not precision={c.precision}; say precision=mxfp4, too"
    for key, keeps_state in (
        ("precision=fp8_delayed", c.precision == "fp8_delayed"),
        ("stochastic_rounding", c.stochastic_rounding != "none"),
    ):
        if keeps_state and c.batch:
            state = f"{key} keeps a state from step to step"
            yield f"{state}, and batch={c.batch.name} takes several batches in one; leave batch= out"
    if c.custom_model and (is_low or c.precision in ("fp16_emulated", "mantissa")):
        yield f"precision={c.precision} rounds products that a custom model lacks; say precision=bf16"
    bits = float(c.mantissa_bits)
    if c.precision == "mantissa" and (bits < FEWEST_BITS or not bits.is_integer()):
        yield f"mantissa_bits is {bits:g}; precision=mantissa takes a whole number from 2 to 23"
    if c.precision != "mantissa" and bits:
        yield f"mantissa_bits={bits:g} rounds nothing; say precision=mantissa, too"


def _of_custom_model(c: Any) -> Iterator[str]:
    if not c.custom_model:
        return
    if len(c.custom_model) > 1:
        yield f"custom_model must hold one model, not {', '.join(c.custom_model)}"
    for role in c.optimizer.by_role:
        yield f"optimizer.{role} holds numbers of a role, and weights of a custom model have none"
    for key, _, is_per_run in leaves(c.custom_model, "custom_model."):
        if is_per_run:
            yield f"{key} is a number per run, but fields of a custom model are static: declare it int or float"
    if (name := c.parametrization.name) != "standard":
        yield f"parametrization={name} does not apply to a custom model, which draws its own initial values"

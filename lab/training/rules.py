"""What may not go together in one run: a table of conditions and of what is said where one holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from lab.core.errors import RequestError, nearest
from lab.core.hooks import HOOK_POINTS, HookIntervention, LossTerm, Predictions, WeightIntervention
from lab.core.schema import leaves
from lab.model.low_precision import PRECISIONS as LOW_PRECISIONS
from lab.optim.links import Link
from lab.optim.links.adam import Adam
from lab.responses.between_steps import OF_ADAM, Branch, EarlierState

FEWEST_BITS = 2  # of precision=mantissa, as many as E5M2 stores
# Switches of fp8, MX and NVFP4, with the value that switches each off.
SWITCHES = {
    **{"gradient_format": "e5m2", "stochastic_rounding": "none"},
    **{"norm_gains": "fp32", "kept_in_bf16": "none", "attention_precision": "bf16"},
}
OF_ONE_SIZE = ("burst", "response", "ledger", "loss_scale")  # groups that take batches of one size
CUSTOM_MODELS_HAVE = ("logits", *(field for field in Predictions._fields if field != "hidden_rbtd"))


def check(config: Any) -> None:
    """Check that all parts of a ``RunConfig`` go together.

    Raises:
        RequestError: two of them do not, or one would change nothing.
    """
    for message in _faults_of_interventions(config):
        raise RequestError(message)
    if config.batch is not None:
        config.batch.entry.micro_batches(config.batch_size, config.steps)
    if config.burst is not None:
        config.burst.entry.check(config.steps)
    for holds, message in RULES:
        if holds(config):
            raise RequestError(message.format(c=config))
    for message in (*_faults_of_response(config), *_faults_of_links(config), *_faults_of_switches(config)):
        raise RequestError(message)


def _is_response(config: Any, kind: type) -> bool:
    return config.response is not None and isinstance(config.response.entry, kind)


def _resets_loss_scale(entry: Any) -> bool:
    return entry is not None and bool(entry.resets_loss_scale)


Rule = tuple[Callable[[Any], object], str]
# What must not hold of a config ``c``, and what is said if it does; the first is said.
RULES: Sequence[Rule] = (
    (
        lambda c: c.adaptive and c.schedule.over == "steps",
        "batch=adaptive ends after a number of tokens, not of steps; add schedule.over=tokens",
    ),
    (
        lambda c: c.batch is None and "noise_scale" in c.probes.names,
        "probe noise_scale compares micro-batches, and the run has none; add batch=constant",
    ),
    *(
        (
            lambda c, group=group: getattr(c, group) and c.batch and c.batch.name != "constant",
            f"{group}={{c.{group}.name}} takes batches of one size, not batch={{c.batch.name}}; "
            "leave batch= out or say batch=constant",
        )
        for group in OF_ONE_SIZE
    ),
    (
        lambda c: _is_response(c, EarlierState) and c.burst is None,
        "response={c.response.name} acts where a burst begins; add burst=rare_tokens",
    ),
    (
        lambda c: _is_response(c, HookIntervention) and c.guest,
        "response={c.response.name} attaches to hook points that a custom model lacks",
    ),
    (lambda c: c.ledger and c.response, "ledger={c.ledger.name} and response={c.response.name} both act; choose one"),
    (
        lambda c: c.loss_scale is None and _resets_loss_scale(c.ledger),
        "ledger={c.ledger.name} resets the loss scale, and the run has none; add loss_scale=metaseq",
    ),
    (
        lambda c: c.loss_scale is None and _resets_loss_scale(c.response and c.response.entry),
        "response={c.response.name} resets the loss scale, and the run has none; add loss_scale=metaseq",
    ),
    (
        lambda c: c.gradient_sum != "fp32" and not (c.batch and c.loss_scale and c.precision == "fp16_emulated"),
        "gradient_sum={c.gradient_sum} sums scaled gradients of micro-batches in fp16; "
        "say batch=constant loss_scale=torch precision=fp16_emulated, too",
    ),
    (
        lambda c: c.master_weights == "none" and c.precision == "fp32",
        "master_weights=none keeps weights in the precision of products; say precision=bf16, too",
    ),
    (
        lambda c: c.master_weights == "none" and c.precision in LOW_PRECISIONS,
        "precision={c.precision} keeps weights in fp32; leave out master_weights=none",
    ),
    (
        lambda c: c.gradient_format != "e5m2" and c.precision in ("mxfp4", "nvfp4"),
        "precision={c.precision} rounds gradients to E2M1; leave out gradient_format",
    ),
    (
        lambda c: c.batch and c.precision == "fp8_delayed",
        "precision=fp8_delayed keeps a state from step to step, and batch={c.batch.name} takes several batches in one; "
        "leave batch= out",
    ),
    (
        lambda c: c.batch and c.stochastic_rounding != "none",
        "stochastic_rounding keeps a state from step to step, and batch={c.batch.name} takes several batches in one; "
        "leave batch= out",
    ),
    (
        lambda c: c.guest and c.precision in ("fp16_emulated", "mantissa", *LOW_PRECISIONS),
        "precision={c.precision} rounds products that a custom model lacks; say precision=bf16",
    ),
    (
        lambda c: (
            c.precision == "mantissa" and (c.mantissa_bits < FEWEST_BITS or not float(c.mantissa_bits).is_integer())
        ),
        "mantissa_bits is {c.mantissa_bits:g}; precision=mantissa takes a whole number from 2 to 23",
    ),
    (
        lambda c: c.precision != "mantissa" and c.mantissa_bits,
        "mantissa_bits={c.mantissa_bits:g} rounds nothing; say precision=mantissa, too",
    ),
    (
        lambda c: c.guest and c.parametrization.name != "standard",
        "parametrization={c.parametrization.name} does not apply to a custom model, which draws its own initial values",
    ),
)


def _faults_of_interventions(config: Any) -> Iterator[str]:
    """Interventions that exclude others, use what no model has, or what a custom model lacks."""
    for name, entry in config.intervention.items():
        for other in getattr(entry, "excludes", ()):
            if other in config.intervention:
                yield f"interventions {name} and {other} exclude each other; choose one of the two"
        if isinstance(entry, HookIntervention):
            yield from _unknown(f"intervention {name} attaches to", entry.hook_points, HOOK_POINTS, config)
            if config.seq_len > entry.most_positions:
                yield (
                    f"intervention {name} has {entry.most_positions} positions, fewer than seq_len {config.seq_len}; "
                    f"say intervention.{name}.positions={config.seq_len}"
                )
        if isinstance(entry, WeightIntervention) and config.guest:
            yield (
                f"intervention {name} acts on weights by their role, which weights of a custom model lack; "
                "say intervention=[]"
            )
        if isinstance(entry, LossTerm):
            yield from _unknown(f"loss term {name} uses", entry.uses, Predictions._fields, config)


def _unknown(clause: str, names: Iterable[str], possible: Sequence[str], config: Any) -> Iterator[str]:
    for name in names:
        if name not in possible:
            yield f"{clause} {name!r}; {nearest(name, possible)}"
        if config.guest and name not in CUSTOM_MODELS_HAVE:
            has = ", ".join(name for name in possible if name in CUSTOM_MODELS_HAVE)
            yield f"{clause} {name}; a custom model has {has} only, so say intervention=[]"


def _faults_of_links(config: Any) -> Iterator[str]:
    """Links that would do nothing in this run, or that need what it does not have."""
    for name, link in config.optimizer.links.items():
        if reason := link.objection(config):
            yield f"optimizer.chain: {name!r} {reason}"
        if config.guest and link.roles != Link.roles:
            yield f"optimizer.chain: {name!r} acts on weights by their role, which a custom model lacks"
        if link.events and config.batch is not None:
            yield (
                f"optimizer.chain: {name!r} reads the forward pass of a step, of which batch={config.batch.name} takes "
                "several; leave batch= out"
            )
    for role in config.optimizer.by_role if config.guest else ():
        yield f"optimizer.{role} holds numbers of a role, and weights of a custom model have none"


def _faults_of_response(config: Any) -> Iterator[str]:
    """A change of Adam without Adam, or with another decay of its first moment."""
    branch = config.response.entry if config.response else None
    if isinstance(branch, Branch) and branch.change in OF_ADAM:
        adam = next((link for link in config.optimizer.links.values() if isinstance(link, Adam)), None)
        if adam is None:
            yield f"response.change={branch.change} changes Adam, which the chain lacks; say optimizer=adamw"
        elif branch.beta1 != adam.beta1:
            yield f"response.beta1={branch.beta1:g} is not that of the optimizer; say response.beta1={adam.beta1:g}"


def _faults_of_switches(config: Any) -> Iterator[str]:
    """Switches of low precision that change nothing, two custom models, and numbers per run in one."""
    if len(config.guest) > 1:
        yield f"guest must hold one model, not {', '.join(config.guest)}"
    for key, off in SWITCHES.items():
        if (value := getattr(config, key)) != off and config.precision not in LOW_PRECISIONS:
            yield f"{key}={value} changes nothing in precision={config.precision}; say precision=mxfp8, too"
    for key, _, is_per_run in leaves(config.guest, "guest."):
        if is_per_run:
            yield f"{key} is a number per run, but fields of a custom model are static: declare it int or float"

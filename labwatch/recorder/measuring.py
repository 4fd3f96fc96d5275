"""What is measured around one update: hooks on a model and its optimizers, which change nothing and then go."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.autograd import Variable
from torch.nn.utils import clip_grad

from lab.core import distributed
from lab.core.axes import per_run_max, per_run_rms
from lab.core.routing import Routing, route
from lab.probes import activations, formats, routing, updates
from labwatch.recorder.attention import Attending, Scores, evenly, intercepting_transformers
from labwatch.recorder.called import Called, tensors
from labwatch.recorder.parts import BETWEEN, EMBEDDING, Parts, plain
from labwatch.recorder.settings import CLIPPING, Settings, log_kept, rate
from labwatch.recorder.tally import OF_WEIGHTS, Key, Tally
from labwatch.recordings.recording import MAX_NORM

OF_BLOCK = (activations.block_rms, activations.block_kurtosis)
OF_SAMPLED_BLOCK = (
    *(formats.block_underflow_e4m3, formats.block_underflow_mx),
    *(formats.block_overflow_fp16, formats.block_overflow_mx),
)
OF_SAMPLED_GRADIENT = (formats.grad_underflow_fp16, formats.grad_underflow_e4m3, formats.grad_underflow_mx)
OF_LOGITS = (routing.router_logit_max, routing.router_log_z, routing.router_entropy)
TOKENS = 512  # of which output logits are measured
ENTRIES = 2**16  # of a tensor, of which shares, and updates unlike Adam's, are measured

MOST_LABELS = 0.9  # the share of tokens whose gradient is that of a cross-entropy, if the loss is one
LEAST_MISSED = 1e-3  # the probability of other tokens, without which a gradient tells no weight
ROUNDED = 0.02  # how far, relatively, rounding may move a gradient at the logits from that of a cross-entropy
MOST_ROWS = 0.5  # the share of rows of which labels are known that stand for all
FOLLOWED = 256  # entries of each weight that are followed from one measured update to the next
DIGITS_LOST = 13  # the last bits of an fp32 number that is one of fp16, too; bf16 has fewer digits still
ROWS = 64  # of a batch, of which it is seen which are equal
EXPECTED = 8  # times that a token must come in a batch, by its least share so far, if it is to be missed
# A second moment keeps ``beta2`` of what it was in each update, so it never is below that, but for rounding.
LEAST_KEPT = 0.9

Function = TypeVar("Function", bound=Callable[..., Any])


def guarded(method: Function) -> Function:
    """A method that keeps its exception as the ``fault`` of its measurement, and does nothing once there is one."""

    @wraps(method)
    def kept(self: Measurement, *args: Any, **kwargs: Any) -> None:
        if self.fault or torch.compiler.is_compiling():  # hooks of a module that was compiled with them
            return
        self.within = getattr(self, "within", 0) + 1
        try:
            with torch.no_grad(), distributed.alone():
                method(self, *args, **kwargs)
        except Exception as fault:
            self.fault = f"{type(fault).__name__}: {fault}".split("\n")[0]
        self.within -= 1

    return kept  # type: ignore[return-value]


class Sampled(NamedTuple):
    """Entries of a weight, or of this rank's shard, before an update, and at which sum of learning rates that was."""

    values: Tensor
    travelled: float


class Moment(NamedTuple):
    """The same entries of the second moment of a weight after an update, and the sum of logarithms that it had kept."""

    values: Tensor
    decayed: float


class Measurement:
    """Measures the forward pass, the gradients and the update of the step that comes.

    A compiled model makes its pass as it would without; before it another pass of the same batch is made without the
    compiler and without gradients, and that one is measured.

    Attributes:
        tally: what was measured.
        lr: the learning rate of the first group of weights; None before the update.
        fault: why the measurement has failed; empty if it has not.
        of_adam: whether updates follow from Adam's moments, and not from a sample of changed weights.
        samples, moments: of each weight entries before the update that was measured last, and then before this one;
            of its second moment those after it.
        entries: which ones.
        kept: of the updates measured so far the least and the largest share of each token, and entries of each buffer.
        called: what the parts compute.
        travelled: by weight the sum of the learning rates since its last sample, and the one of this update.
        within: how many guarded methods are running; a pass that is made alone is one.
    """

    within = 0

    def __init__(
        self,
        model: nn.Module,
        parts: Parts,
        optimizers: Sequence[torch.optim.Optimizer],
        settings: Settings,
        samples: dict[str, Sampled],
        moments: dict[str, Moment],
        entries: dict[str, Tensor],
        kept: dict[str, Tensor],
        scaler: Any = None,
    ) -> None:
        self.model, self.parts, self.scaler = model, parts, scaler
        self.settings, self.samples, self.moments, self.entries, self.kept = settings, samples, moments, entries, kept
        self.called = Called(model, parts)
        self.rows = 1  # of the batch
        self.tokens: Tensor | None = None  # of the batch ``[b t]``, if it is of tokens
        self.of_pass, self.of_backward = dict[str, Tensor](), dict[str, Tensor]()
        self.travelled = dict[str, tuple[float, float]]()
        self.number_of = {id(optimizer): number for number, optimizer in enumerate(optimizers)}
        self.name_of = self.called.name_of
        self.tally, self.fault, self.of_adam = Tally(), "", True
        self.lr: float | None = None
        self.depth, self.is_measured, self.is_shadow, self.is_queued = 0, False, False, False
        self.has_begun = False
        self.inside, self.seen, self.seen_before = list[str](), set[tuple[str, str]](), set[str]()
        self.shape: tuple[int, int] | None = None  # batch and length of the hidden states
        self.of_head: Tensor | None = None
        self.to_choose = dict[str, Routing]()
        self.before = dict[str, Tensor]()
        self.hooks, self.passing = ExitStack(), ExitStack()
        if any(map(_is_compiled, model.modules())):
            self._hook_compiled()
        else:
            self._hook_passes(self.hooks)
        settings.now[CLIPPING] = {MAX_NORM: math.inf}
        self.hooks.enter_context(CLIP.before(self._before_clipping))
        self.hooks.enter_context(BACKWARD.before(self._keep_loss))
        self.hooks.enter_context(GRAD.before(lambda *_, **__: None))
        for optimizer in optimizers:
            self.hooks.callback(optimizer.register_step_pre_hook(self._begin_update).remove)
            self.hooks.callback(optimizer.register_step_post_hook(self._after_update).remove)

    def __reduce__(self) -> tuple[Any, ...]:
        """A model may be copied or saved while it is measured; the hooks of the copy do nothing."""
        return Inert, ()

    def end(self) -> None:
        """Take all hooks away."""
        self.hooks.close()
        self.passing.close()
        self.of_head = None  # its graph holds hooks that hold this
        self.to_choose.clear()  # of blocks that chose otherwise

    # the forward pass

    def _hook_passes(self, hooks: ExitStack) -> None:
        """Measure the passes of a model that is not compiled."""
        blocks = {*self.parts.blocks.values()}
        modules = dict(self.model.named_modules())
        prefixes = {
            inner: f"{name}." for name, block in modules.items() if block in blocks for inner in block.modules()
        }
        for name, module in modules.items():
            path = plain(f"{name}.".removeprefix(prefixes.get(module, ""))).rstrip(".")
            hooks.callback(module.register_forward_pre_hook(partial(self._enter_module, path)).remove)
            hooks.callback(module.register_forward_hook(self._leave_module, always_call=True).remove)
        for module in self.parts.outer:
            hooks.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(self._leave, always_call=True).remove)
        for place, block in self.parts.blocks.items():
            enter, leave = partial(self._enter_block, place), partial(self._leave_block, place)
            hooks.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(block.register_forward_hook(leave, always_call=True).remove)
        for place, router in self.parts.routers.items():
            hooks.callback(router.module.register_forward_hook(partial(self._route, place)).remove)
        if self.parts.head is not None:
            hooks.callback(self.parts.head.register_forward_hook(self._measure_head).remove)

    def _hook_compiled(self) -> None:
        """Make a pass without the compiler before each pass of a compiled model."""
        for module in self.parts.outer:
            if module._compiled_call_impl is not None:  # hooks would be compiled with the module
                call = module._compiled_call_impl
                module._compiled_call_impl = partial(self._call_compiled, module, call)
                self.hooks.callback(setattr, module, "_compiled_call_impl", call)
            else:
                self.hooks.callback(module.register_forward_pre_hook(self._shadow, with_kwargs=True).remove)
                hook = module.register_forward_hook(lambda _, __, output: self._await_backward(output))
                self.hooks.callback(hook.remove)
            if _is_compiled(module):
                return

    def _call_compiled(self, module: nn.Module, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._shadow(module, args, kwargs)
        output = call(*args, **kwargs)
        self._await_backward(output)
        return output

    def _shadow(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.is_shadow and torch.is_grad_enabled():
            self._pass_alone(module, args, kwargs)
            self.is_shadow = False

    @guarded
    def _pass_alone(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.is_shadow = True
        device = next(self.model.parameters()).device
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.compiler.set_stance("force_eager"),
            ExitStack() as hooks,
        ):
            self._hook_passes(hooks)
            module(*args, **kwargs)
        for buffer, value in buffers:
            buffer.copy_(value)

    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.depth += 1
        if self.depth == 1:
            self._begin(torch.is_grad_enabled() or self.is_shadow, args, kwargs)

    @guarded
    def _begin(self, is_measured: bool, args: Any, kwargs: Any) -> None:
        """Begin to measure a pass, unless it is an evaluation."""
        self.is_measured, self.inside, self.seen, self.of_head = is_measured, [], set(), None
        if not is_measured:
            return
        if self.called.is_first:
            in_training = [module.training for module in self.model.modules()]
            self.tally.add(Key("in_evaluation"), 1 - sum(in_training) / len(in_training))
            self._compare_buffers()
            if not self.samples:
                self._measure_norms()
        self.called.begin(args, kwargs)
        given = [*tensors([args, kwargs])]
        self.passing.enter_context(intercepting_transformers(self._measure_scores))
        self.passing.enter_context(
            Attending(
                self._measure_scores,
                self._measure_dropout,
                self._hear,
                lambda: self.shape if self.inside else None,
            )
        )
        batch = next((x for x in given if x.ndim > 1), None)
        if batch is not None:
            self.rows = len(batch)
            self.tally.add(Key("distinct_rows"), _distinct_rows(batch))
            if batch.is_floating_point():
                self.tally.add(Key("batch_rms"), per_run_rms(batch.float()[None]))
        tokens = next((x for x in given if x.ndim == 2 and x.dtype == torch.long), None)
        self.tokens = tokens
        if tokens is not None and self.parts.vocabulary:
            count_v = _counts(tokens, max(self.parts.vocabulary))
            self.tally.add(Key("token_perplexity"), _perplexity(count_v))
            for name, value in self._against_those_before("token", count_v).items():
                self.tally.add(Key(name), value)

    def _measure_norms(self) -> None:
        """Measure in which gains and biases of norms all entries are one number, as before the first update of all."""
        norms = {id(w) for of in self.model.modules() if "Norm" in type(of).__name__ for w in of.parameters()}
        for name, weight in self.model.named_parameters():
            place, vector = self.parts.where.get(name), _whole_or_shard(weight)
            if id(weight) in norms and place in self.parts.blocks and vector is not None and vector.numel() > 1:
                self.tally.add(Key("constant_norms", place, name), (vector == vector[0, 0]).all())

    def _compare_buffers(self) -> None:
        """Measure which buffers have other values than at the update that was measured before."""
        for name, buffer in self.model.named_buffers():
            if name in self.parts.where and buffer.numel() and not hasattr(buffer, "to_local"):
                values, before = buffer.flatten()[self._entries(name, buffer)], self.kept.get(name)
                if before is not None:
                    differs = (values != before).any() if values.shape == before.shape else 1.0
                    self.tally.add(Key("buffer_written", self.parts.where[name], name), differs)
                self.kept[name] = values

    def _against_those_before(self, what: str, count_v: Tensor) -> dict[str, Tensor]:
        """The share that is missing of tokens or labels that were in every batch so far, and the share of new ones."""
        share_v, (least, largest) = count_v / count_v.sum(), (f"{of} share of a {what}" for of in ("least", "largest"))
        found = dict[str, Tensor]()
        if what in self.seen_before:  # only the first micro-batch of an update counts
            return found
        self.seen_before.add(what)
        if least in self.kept:
            is_gone_v = (count_v == 0) & (self.kept[least] * count_v.sum() > EXPECTED)
            found[f"{what}_gone"] = torch.where(is_gone_v, self.kept[least], 0.0).sum()
            found[f"{what}_new"] = torch.where(self.kept[largest] == 0, share_v, 0.0).sum()
        least_v = self.kept.get(least, share_v)  # what is missing stays so until it comes again
        self.kept[least] = torch.where(share_v > 0, torch.fmin(least_v, share_v), least_v)
        self.kept[largest] = torch.fmax(self.kept.get(largest, share_v), share_v)
        return found

    @guarded
    def _measure_dropout(self, p: float) -> None:
        if self.is_measured:
            self.tally.add(Key("dropout", self.inside[-1] if self.inside else ""), p)

    def _hear(self, *call: Any) -> None:
        if self.is_measured and self.within == self.is_shadow:  # others are the recorder's own
            self._keep_call(*call)

    @guarded
    def _keep_call(self, *call: Any) -> None:
        for x in tensors(call[1:3]):
            name = self.name_of.get(id(x), "")
            if name and x.requires_grad and name not in self.of_pass and not self.called.is_sharded:
                self.of_pass[name] = x.detach().flatten()[self._entries(name, x)].float()
        self._choose(*call)
        has_passed = any(kind == "block" for kind, _ in self.seen)
        self.called.keep(self.inside[-1] if self.inside else BETWEEN if has_passed else EMBEDDING, *call)

    @guarded
    def _enter_module(self, name: str, *_: Any) -> None:
        self.called.modules.append(name)

    @guarded
    def _leave_module(self, *_: Any) -> None:
        if self.called.modules:  # a module that began before the pass may end in it
            self.called.modules.pop()

    def _leave(self, _: nn.Module, __: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.depth -= 1
        if self.depth == 0:
            self.passing.close()
            self._end_pass(output)

    @guarded
    def _end_pass(self, output: Any) -> None:
        if self.is_measured:
            self.called.end(output)
            self._measure_logits(output)
            self._await_backward(output)
        self.is_measured = False

    @guarded
    def _enter_block(self, place: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.inside.append(place)
        if self.is_measured:
            self.called.enter(place)
        hidden = next((x for x in tensors([args, kwargs]) if x.ndim == 3), None)
        self.shape = None if hidden is None else (hidden.shape[0], hidden.shape[1])
        if hidden is not None and place == next(iter(self.parts.blocks)) and self._is_new("input", place):
            self.tally.add(Key("input_square"), activations.block_rms(hidden.float()[None]) ** 2)

    @guarded
    def _leave_block(self, place: str, _: nn.Module, __: Any, output: Any) -> None:
        self.inside.pop()
        self.called.is_used(output)
        self.called.keep_unused(place)
        hidden = next(tensors(output), None)
        if hidden is not None and self._is_new("block", place):
            x_rbtd = hidden.float()[None]
            for measure in OF_BLOCK:
                self.tally.add(Key(measure.__name__, place), measure(x_rbtd))
            for measure in OF_SAMPLED_BLOCK:
                self.tally.add(Key(measure.__name__, place), measure(_sample(x_rbtd)))

    def _is_new(self, kind: str, place: str) -> bool:
        """Whether it is measured, for the first time in a pass: a checkpointed block runs once more in the backward."""
        is_new = self.is_measured and (kind, place) not in self.seen
        self.seen.add((kind, place))
        return is_new

    @guarded
    def _measure_scores(self, scores: Callable[[], Scores]) -> None:
        place = self.inside[-1] if self.inside else ""
        if self._is_new("attention", place):
            scores_rbhts, weights_rbhts, ahead, seen = scores()
            seeing = (weights_rbhts > 0).any(-1).double().mean()  # others are padding
            self.tally.add(Key("attention_logit_max", place), per_run_max(scores_rbhts))
            self.tally.add(Key("attention_entropy", place), activations.attention_entropy(weights_rbhts) / seeing)
            self.tally.add(Key("attention_ahead", place), ahead)
            self.tally.add(Key("attention_seen", place), seen)
            self.tally.add(Key("attention_heads", place), scores_rbhts.shape[2])

    @guarded
    def _measure_head(self, _: nn.Module, __: Any, output: Tensor) -> None:
        self.of_head = output

    def _logits(self, output: Any) -> Tensor | None:
        known = self.parts.vocabulary
        return next((x for x in tensors(output) if x.ndim == 3 and x.shape[-1] in known), self.of_head)

    def _measure_logits(self, output: Any) -> None:
        """Measure the logits that a model returns, as many as it has embeddings, or else what its head made."""
        logits = self._logits(output)
        if logits is None:
            return
        logits_rbtv = _tokens(logits).float()[None, None]
        log_z_rbt = logits_rbtv.logsumexp(-1)
        counted_rbt = torch.ones_like(log_z_rbt, dtype=torch.bool)
        self.tally.add(Key("output_logit_mean"), activations.output_logit_mean(logits_rbtv))
        self.tally.add(Key("output_logit_rms"), activations.output_logit_rms(logits_rbtv))
        self.tally.add(Key("log_z"), activations.log_z(log_z_rbt, counted_rbt))
        self.tally.add(Key("log_z_square"), activations.log_z_square(log_z_rbt, counted_rbt))

    @guarded
    def _measure_labels(self, gradient_nv: Tensor, logits_nv: Tensor, count: int, tokens: Tensor | None) -> None:
        """Labels and the weight of the loss, which the gradient at logits shows: ``weight * (p - label) / tokens``.

        So it is negative at the label alone, and zero where no label counts. Of other losses nothing is known, nor of
        the labels of rows without gradients, so if these are most rows, how labels differ is not known either.
        """
        if GRAD.running:
            return
        of_samples_nv = gradient_nv
        is_climbed = (gradient_nv > 0).double().mean() < (gradient_nv < 0).double().mean()  # a loss with a wrong sign
        gradient_nv = torch.where(is_climbed, -gradient_nv, gradient_nv)
        label_n, counts_n = gradient_nv.argmin(-1), (gradient_nv != 0).any(-1)
        at_n = torch.tensor(evenly(count, TOKENS), device=counts_n.device)
        row_n = at_n * self.rows // count
        sampled_b, counted_b = (
            torch.zeros(self.rows, device=counts_n.device).index_add_(0, row_n, of_n)
            for of_n in (torch.ones_like(row_n, dtype=torch.float32), counts_n.float())
        )
        row_share = (counted_b > 0).double().sum() / (sampled_b > 0).sum()
        is_cross_entropy = ((gradient_nv < 0).sum(-1) == counts_n).double().mean() > MOST_LABELS
        share = counts_n.double().mean()
        probability_nv = logits_nv.double().softmax(-1)
        right_n = probability_nv.gather(-1, label_n[:, None])[:, 0]
        missed_n = 1 - right_n
        size_n = gradient_nv.double().abs().sum(-1)
        is_exact_n = _is_of_tokens(gradient_nv, probability_nv, label_n, size_n / 2 / missed_n)
        self.tally.add(Key("cross_entropy"), (is_exact_n | ~counts_n).double().mean())
        weight = size_n.sum() / 2 / torch.where(counts_n, missed_n, 0.0).sum() * share * count
        weight = torch.where(is_climbed, -weight, weight)
        label_loss = -torch.where(counts_n, right_n.log(), 0.0).sum() / counts_n.sum()
        scale = self.scaler.get_scale() if self.scaler and self.scaler.is_enabled() else 1.0
        count_v = _counts(label_n, gradient_nv.shape[-1], counts_n)
        perplexity = _perplexity(count_v)
        perplexity = torch.where(row_share < MOST_ROWS, math.nan, perplexity)
        measured = {"label_perplexity": perplexity, "label_share": share / row_share, "row_share": row_share}
        measured |= self._against_those_before("label", count_v)
        measured |= {"label_count": share / row_share * count, "loss_weight": weight / scale, "label_loss": label_loss}
        if tokens is not None and tokens.numel() == count:
            has_next_n = counts_n & ((at_n + 1) % tokens.shape[1] > 0)
            of_labels = {"label_next": tokens.flatten().roll(-1)[at_n], "label_same": tokens.flatten()[at_n]}
            for name, token_n in of_labels.items():
                measured[name] = ((label_n == token_n) & has_next_n).double().sum() / has_next_n.sum()
            next_n = tokens.flatten().roll(-1)[at_n].clamp(0, logits_nv.shape[-1] - 1)
            self._measure_samples(next_n, has_next_n, probability_nv, logits_nv, of_samples_nv * share * count / scale)
        for name, value in measured.items():
            is_known = is_cross_entropy & value.isfinite()
            self.tally.add(Key(name), torch.where(is_known, value, math.nan))

    def _measure_samples(
        self, next_n: Tensor, counts_n: Tensor, probability_nv: Tensor, logits_nv: Tensor, gradient_nv: Tensor
    ) -> None:
        """How surprising next tokens are beyond the entropy; and weights of a gradient ``weight * (p - next)``."""
        surprisal_n = logits_nv.float().logsumexp(-1) - logits_nv.gather(-1, next_n[:, None])[:, 0]
        excess_n = surprisal_n - torch.special.entr(probability_nv).sum(-1)
        missed_n = 1 - probability_nv.gather(-1, next_n[:, None])[:, 0]
        weight_n = -gradient_nv.gather(-1, next_n[:, None])[:, 0].double() / missed_n
        is_exact_n = _is_of_tokens(gradient_nv, probability_nv, next_n, weight_n)
        weight_n = torch.where((is_exact_n | ~counts_n).double().mean() > MOST_LABELS, weight_n, math.nan)
        known_n = counts_n & (missed_n > LEAST_MISSED)
        mean, mean_square = (torch.where(known_n, x_n, 0.0).sum() / known_n.sum() for x_n in (weight_n, weight_n**2))
        self.tally.add(Key("sample_weight"), mean)
        self.tally.add(Key("sample_weight_rms"), mean_square.sqrt())
        self.tally.add(Key("excess_surprisal"), torch.where(counts_n, excess_n, 0.0).sum() / counts_n.sum())

    @guarded
    def _route(self, place: str, module: nn.Module, _: Any, output: Any) -> None:
        """Measure the logits of a router, and count the routes that it chose or would choose by them."""
        router = self.parts.routers[place]
        outputs = list(tensors(output))
        logits = next((x for x in outputs if x.is_floating_point() and x.shape[-1] == router.experts), None)
        chosen = next((x for x in outputs if not x.is_floating_point()), None)
        if not self._is_new("router", place):
            return
        if logits is None:
            if chosen is not None:
                experts = torch.arange(router.experts, device=chosen.device)
                self._count(place, (chosen.flatten()[:, None] == experts).sum(0))
            return
        routed = route(logits.float().reshape(1, 1, -1, router.experts), router.top_k or 1, is_sigmoid=False)
        for measure in OF_LOGITS:
            self.tally.add(Key(measure.__name__, place), measure(routed))
        if chosen is not None or router.top_k:
            self._measure_routes(place, routed, chosen)
        else:
            self.to_choose[place] = routed

    def _choose(self, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Measure the routes of a block that chooses experts for each token by ``topk`` itself."""
        place = self.inside[-1] if self.inside else ""
        if function not in (torch.topk, Tensor.topk) or place not in self.to_choose:
            return
        named = dict(zip(("input", "k", "dim"), args, strict=False)) | kwargs
        x, (tokens, experts) = named["input"], self.to_choose[place].logits_rbte.shape[2:]
        if named.get("dim", -1) in (-1, x.ndim - 1) and x.shape[-1] == experts and x.shape[:-1].numel() == tokens:
            self._measure_routes(place, self.to_choose.pop(place), output.indices)

    def _measure_routes(self, place: str, routed: Routing, chosen: Tensor | None) -> None:
        if chosen is not None:
            experts = torch.arange(routed.logits_rbte.shape[-1], device=chosen.device)
            is_chosen = (chosen[..., None] == experts).any(-2)
            routed = routed._replace(chosen_rbte=is_chosen.reshape(routed.logits_rbte.shape))
        self.tally.add(Key("router_balance", place), routing.router_balance(routed))
        self._count(place, routed.chosen_rbte.flatten(0, 2).sum(0))

    def _count(self, place: str, load_e: Tensor) -> None:
        """Keep the routes to each expert."""
        for expert, load in enumerate(load_e):
            self.tally.add(Key("expert_load", place, str(expert)), load)

    # gradients and updates

    @guarded
    def _await_backward(self, output: Any) -> None:
        """Measure the labels in the backward pass, and gradients at its end, before anything clips them."""
        logits = self._logits(output)
        if logits is not None and logits.requires_grad and not self.is_shadow:
            sample_nv, count, tokens = _tokens(logits), logits[..., 0].numel(), self.tokens
            logits.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: self._measure_labels(_tokens(gradient).float(), sample_nv, count, tokens)
            )
        for x in tensors(output):
            if x.requires_grad and not self.is_shadow:
                self.called.returns(x)
                x.register_hook(lambda _: self._queue())  # type: ignore[no-untyped-call]

    def _queue(self) -> None:
        if not self.is_queued and not GRAD.running:
            self.is_queued = True
            if not self.has_begun:
                self._keep_gradients("left")
                self.has_begun = True
            engine: Any = Variable._execution_engine
            # once more from within, to come after what averages gradients over ranks
            engine.queue_callback(lambda: engine.queue_callback(self._after_backward))

    def _after_backward(self) -> None:
        self.is_queued = False
        self._keep_gradients("backward")

    @guarded
    def _keep_loss(self, losses: Any, *_: Any, **__: Any) -> None:
        self.called.keep_loss(losses)

    def _before_clipping(self, _: Any, max_norm: float, *__: Any, **___: Any) -> None:
        self.settings.now[CLIPPING] = {MAX_NORM: float(max_norm)}
        if not (self.scaler and self.scaler.is_enabled()):  # with one, clipping may meet scaled gradients or others
            self._keep_gradients("unclipped")

    @guarded
    def _keep_gradients(self, when: str) -> None:
        """Measure all gradients: those left before the backward pass, at its end, or before they are clipped."""
        scale = 1.0
        if self.scaler and self.scaler.is_enabled():
            scale = self.scaler.get_scale()
            self.tally.kept[Key("loss_scale")] = [(torch.tensor(scale), 1.0)]
        for name, weight in self.weights().items():
            if (gradient := _whole_or_shard(weight.grad)) is not None:
                key = Key(when, self.parts.where[name], name)
                rms = updates.grad_rms({name: gradient})[name] / scale
                self.tally.kept[key] = [(rms.reshape(()), gradient.numel())]  # of several micro-batches the sum
                self._compare(name, gradient, when)
            elif when == "left":
                self.tally.kept[Key(when, self.parts.where[name], name)] = [(torch.tensor(0.0), weight.numel())]

    def _compare(self, name: str, gradient: Tensor, when: str) -> None:
        """Keep entries of a gradient at the end of the backward pass, and later in how many the signs agree.

        As the mean of 1 and -1, and of 0 where it has become zero.
        """
        values = gradient.flatten()[self._entries(name, gradient)]
        if when == "backward":
            self.of_backward[name] = values
        elif name in self.of_backward:
            sign_e = self.of_backward[name].sign()
            shared = (values.sign() * sign_e).sum() / sign_e.abs().sum()
            key = Key("grad_signs", self.parts.where[name], name)
            self.tally.kept[key] = [(torch.where(sign_e.any(), shared, 1.0), len(values))]

    def _entries(self, name: str, whole: Tensor) -> Tensor:
        """Which entries of a weight, or of this rank's shard, are followed."""
        if name not in self.entries:
            size = whole.numel()
            random = torch.Generator().manual_seed(size)  # so names, which wrapping changes, make no difference
            entries = torch.randint(size, (FOLLOWED,), generator=random) if size > FOLLOWED else torch.arange(size)
            self.entries[name] = entries.to(whole.device)
        return self.entries[name]

    def weights(self) -> dict[str, Tensor]:
        """The weights that are trained, by name; not those that the model got since it was recorded first."""
        weights = self.model.named_parameters()
        return {name: weight for name, weight in weights if weight.requires_grad and name in self.parts.where}

    def _begin_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Measure before an update; of one with a closure, in which the gradients are made, after that."""
        (*rest, closure) = args if len(args) > 1 else (*args, kwargs.get("closure"))
        if closure is None:
            self._before_update(optimizer)
            return None

        def measured() -> Any:
            loss = closure()
            self._before_update(optimizer)
            return loss

        return (*rest, measured), {key: value for key, value in kwargs.items() if key != "closure"}

    @guarded
    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
        for name, weight, of_group, group in self._of(optimizer):
            self.lr = _rate(group) if self.lr is None else self.lr
            w, g = _whole_or_shard(weight), _whole_or_shard(weight.grad)
            if weight.grad is None and name in self.samples:
                self.tally.add(Key("no_gradient", self.parts.where[name], name), 1.0)
            if w is None or g is None:
                continue
            scale = getattr(optimizer, "grad_scale", None)  # of a fused optimizer, which divides by it itself
            g = g if scale is None else g / scale
            self._follow(name, w, of_group, group, weight.dtype)
            self._follow_moment(name, w, of_group, optimizer.state.get(weight, {}), group)
            self._add(name, "param_rms", updates.param_rms({name: w})[name], w)
            self._add(name, "grad_rms", updates.grad_rms({name: g})[name], g)
            self._compare(name, g, "update")
            sampled = {name: _sample(g)}
            if isinstance(group.get("eps"), int | float):  # Adafactor has two
                self._add(name, "grad_below_eps", updates.grad_below_eps(sampled, group["eps"])[name], g)
                self.tally.add(Key("eps", self.parts.where[name], name), float(group["eps"]))
            for measure in OF_SAMPLED_GRADIENT:
                self._add(name, measure.__name__, measure(sampled)[name], g)
            if not _is_adam(optimizer, group):
                self.before[name] = _sample(w).clone()

    def _follow(
        self, name: str, w: Tensor, of_group: tuple[int, int], group: Mapping[str, Any], dtype: torch.dtype
    ) -> None:
        """Take entries of a weight before an update, and measure how far they are from where they were taken last."""
        if not w.numel():
            return
        now, own = w.flatten()[self._entries(name, w)], rate(group)
        travelled = self.settings.travelled[of_group] - own  # up to this update, which is not made yet
        if (in_pass := self.of_pass.pop(name, None)) is not None:  # later updates of a step have moved it
            self._add(name, "weights_in_pass", (in_pass == now).double().mean(), now)
        last = self.samples.get(name)
        if last is not None:
            self._add(name, "moved", per_run_rms((now - last.values)[None]), now)
            larger = torch.maximum(per_run_rms(now[None]), per_run_rms(last.values[None]))
            self._add(name, "followed_rms", larger, now)
            has_moved = now != last.values
            if dtype is torch.float32:
                is_rounded = has_moved & (now.view(torch.int32) % 2**DIGITS_LOST == 0)
                share = is_rounded.sum() / has_moved.sum()
                self._add(name, "weights_rounded", torch.where(has_moved.any(), share, 1.0), now)
        self.travelled[name] = (math.nan if last is None else travelled - last.travelled, own)
        self.samples[name] = Sampled(now, travelled)

    def _follow_moment(
        self, name: str, w: Tensor, of_group: tuple[int, int], state: Mapping[str, Any], group: Mapping[str, Any]
    ) -> None:
        """Measure in how many entries the second moment has kept what updates since the last one leave of it."""
        if isinstance(made := state.get("step"), Tensor | int | float):
            self.tally.add(Key("state_updates", self.parts.where[name], name), made, w.numel())
        square, last = _second_moment(state, w), self.moments.get(name)
        kept = log_kept(group)
        if square is not None and last is not None and kept is not None:
            decayed = self.settings.decayed[of_group] - kept  # without this update
            least_e = LEAST_KEPT * math.exp(decayed - last.decayed) * last.values
            is_kept_e = square.flatten()[self.entries[name]] >= least_e
            self._add(name, "state_kept", is_kept_e.double().mean(), is_kept_e)

    @guarded
    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for name, weight, of_group, group in self._of(optimizer):
            w, g, state = _whole_or_shard(weight), _whole_or_shard(weight.grad), optimizer.state.get(weight, {})
            if w is None or g is None:
                continue
            is_lost = torch.zeros((), dtype=torch.bool, device=w.device)
            if name in self.samples:
                values, now = self.samples[name].values, w.flatten()[self.entries[name]]
                self._add(name, "followed_step", per_run_rms((now - values)[None]), values)
                sign = g.flatten()[self.entries[name]].sign()
                is_same = now == values
                is_lost = is_same.all() & sign.any()  # written to a copy, or nowhere
                against = (values - now).sign() * sign
                if weight.dtype.itemsize < 4:
                    share = torch.where(sign.any(), (is_same * sign.abs()).sum() / sign.abs().sum(), 0.0)
                    self._add(name, "updates_lost", share, values)
                for of, number in (("against_gradient", against.sum()), ("with_signs", against.abs().sum())):
                    self.tally.add(Key(of, self.parts.where[name], name), number)
            lr, square = _rate(group), _whole_or_shard(state.get("exp_avg_sq"))
            if name in self.entries and (moment := _second_moment(state, w)) is not None:
                self.moments[name] = Moment(moment.flatten()[self.entries[name]], self.settings.decayed[of_group])
            betas, made = group.get("betas", ()), state.get("step", group.get("step"))
            if square is not None and square.shape == g.shape and len(betas) == 2 and made is not None:
                unbias1, unbias2 = (1 - beta ** float(made) for beta in betas)
                self._add(name, "moment_ratio", updates.moment_ratio({name: g}, {name: square}, unbias2)[name], g)
                sampled = {name: _sample(g)}, {name: _sample(square)}
                self._add(name, "moment_outliers", updates.moment_outliers(*sampled, unbias2)[name], g)
            if _is_adam(optimizer, group):
                mean = _whole_or_shard(state["exp_avg"])
                direction = (mean / unbias1) / ((square / unbias2).sqrt() + group["eps"])
                update_rms = torch.where(is_lost, 0.0, updates.update_rms({name: direction})[name])
                step_rms = float(group["lr"]) * update_rms
            elif name in self.before:
                direction, self.of_adam = self.before.pop(name) - _sample(w), False
                step_rms = updates.update_rms({name: direction})[name]
                update_rms = step_rms / lr if lr else step_rms
            else:
                continue
            self._add(name, "step_rms", step_rms, direction)
            if lr or _is_adam(optimizer, group):
                self._add(name, "update_rms", update_rms, direction)

    def _of(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor, tuple[int, int], Mapping[str, Any]]]:
        """The weights of an optimizer: their names, the weights, the numbers of optimizer and group, and the group."""
        optimizer_number = self.number_of[id(optimizer)]
        for number, group in enumerate(optimizer.param_groups):
            for weight in group["params"]:
                if id(weight) in self.name_of:
                    yield self.name_of[id(weight)], weight, (optimizer_number, number), group

    def _add(self, name: str, of: str, value: Tensor, measured: Tensor) -> None:
        """Keep a number of a weight, and of each expert that it holds or belongs to."""
        place = self.parts.where[name]
        self.tally.add(Key(of, place, name), value, measured.numel())
        if of not in OF_WEIGHTS:
            return
        if name in self.parts.expert:
            self.tally.add(Key(f"expert_{of}", place, f"{self.parts.expert[name]}/{name}"), value, measured.numel())
        elif name in self.parts.stacked and len(measured[0]) == self.parts.routers[place].experts:  # no shard of them
            for expert, rms in enumerate(per_run_rms(measured[0])):
                self.tally.add(Key(f"expert_{of}", place, f"{expert}/{name}"), rms, measured[0, 0].numel())


class Inert(Measurement):
    """Measures nothing."""

    def __init__(self) -> None:
        self.fault, self.depth, self.passing, self.is_shadow = "copied", 0, ExitStack(), False


class Intercepted:
    """A function of a module of torch that has others called before it, with its arguments, if there are any."""

    def __init__(self, module: Any, name: str) -> None:
        self.module, self.name, self.acts = module, name, list[Callable[..., None]]()
        self.running = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for act in self.acts:
            act(*args, **kwargs)
        self.running += 1
        try:
            return self.function(*args, **kwargs)
        finally:
            self.running -= 1

    @contextmanager
    def before(self, act: Callable[..., None]) -> Iterator[None]:
        """Within the block, ``act`` is called before the function."""
        if not self.acts:
            self.function = getattr(self.module, self.name)
            setattr(self.module, self.name, self)
        self.acts.append(act)
        try:
            yield
        finally:
            self.acts.remove(act)
            if not self.acts:
                setattr(self.module, self.name, self.function)


# Gradients are read before they are clipped, since one NaN would make all NaN, and the graph of the loss before the
# backward pass, which frees the numbers in it. What ``grad`` returns is no gradient of the update.
CLIP, BACKWARD = Intercepted(clip_grad, "_clip_grads_with_norm_"), Intercepted(torch.autograd, "backward")
GRAD = Intercepted(torch.autograd, "grad")


def _is_compiled(module: nn.Module) -> bool:
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def _rate(group: Mapping[str, Any]) -> float | None:
    """The learning rate; None of an optimizer that finds one itself."""
    rate = group.get("lr")
    return None if rate is None else float(rate)


def _is_adam(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    return isinstance(optimizer, torch.optim.Adam) and not group["amsgrad"]


def _second_moment(state: Mapping[str, Any], w: Tensor) -> Tensor | None:
    """That of Adam or RMSprop, with a number for each of the weight."""
    square = _whole_or_shard(state.get("exp_avg_sq", state.get("square_avg")))
    return square if square is not None and square.shape == w.shape else None


def _whole_or_shard(tensor: Tensor | None) -> Tensor | None:
    """A tensor, or this rank's shard, in fp32 with a run axis ``[1 ...]``, a number as ``[1 1]``; None if sparse."""
    if tensor is None or tensor.is_sparse:
        return None
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local = local.detach().float()
    return local.reshape(1, *(local.shape or (1,)))


def _sample(x_r: Tensor) -> Tensor:
    """Rows along the last axis, evenly spaced, of at most so many entries: ``[1 n d]``."""
    rows_rnd = x_r.reshape(1, -1, x_r.shape[-1])
    return rows_rnd[:, evenly(rows_rnd.shape[1], max(1, ENTRIES // max(1, x_r.shape[-1])))]


def _distinct_rows(batch: Tensor) -> Tensor:
    """The share of rows of a batch that remains if each stands for all that are equal to it, of a sample of them."""
    x_bn = batch.flatten(1)
    x_bn = x_bn[evenly(len(x_bn), ROWS)][:, evenly(x_bn.shape[1], TOKENS)]
    return (x_bn[:, None] == x_bn).all(-1).sum(-1).double().reciprocal().mean()


def _counts(token: Tensor, vocabulary: int, counts: Tensor | None = None) -> Tensor:
    """How often each token comes in a batch, of those that count."""
    ones = torch.ones_like(token, dtype=torch.float64) if counts is None else counts.double()
    count_v = torch.zeros(vocabulary, dtype=torch.float64, device=token.device)
    return count_v.scatter_add_(0, token.flatten().clamp(0, vocabulary - 1), ones.flatten())


def _is_of_tokens(gradient_nv: Tensor, probability_nv: Tensor, token_n: Tensor, weight_n: Tensor) -> Tensor:
    """Whether a gradient at logits is ``weight * (p - token)``, but for rounding."""
    rest_nv = gradient_nv - weight_n[:, None] * probability_nv
    rest_nv.scatter_add_(-1, token_n[:, None], weight_n[:, None])
    return rest_nv.abs().sum(-1) < ROUNDED * gradient_nv.double().abs().sum(-1)


def _perplexity(count_v: Tensor) -> Tensor:
    """The exponential of the entropy of the tokens of a batch: how many different ones it has."""
    entropy: Tensor = torch.special.entr(count_v / count_v.sum()).sum()
    return entropy.exp()


def _tokens(logits_btv: Tensor) -> Tensor:
    """Logits ``[n v]`` of a sample of tokens."""
    logits_nv = logits_btv.detach().flatten(0, -2)
    return logits_nv[evenly(len(logits_nv), TOKENS)]

"""Small training loops with a recorder, and the faults that are planted in them; see ``recorded_faults.py``.

The loops are written as a user of PyTorch writes them, of models and optimizers that are none of the lab's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

import lab

WIDTH, BLOCKS, HEADS, VOCABULARY, LENGTH, ROWS = 32, 4, 2, 32, 24, 8
CLASSES, SIDE, PATCH = 8, 8, 2
EXPERTS, CHOSEN = 4, 2
IGNORED = -100  # the label that cross_entropy leaves out
LARGEST_LOGIT = 2.0  # of attention, where it is clipped


class Attention(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.is_causal = is_causal
        self.scale: float | None = None
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        mixed = F.scaled_dot_product_attention(*qkv.unbind(2), self.mask, is_causal=self.is_causal, scale=self.scale)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.top_k = nn.Linear(WIDTH, EXPERTS), CHOSEN
        self.experts = nn.ModuleList(mlp() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        probability = self.router(x).softmax(-1)
        top, chosen = probability.topk(self.top_k)
        gate = torch.zeros_like(probability).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
        self.balancing = EXPERTS * ((gate > 0).float().mean((0, 1)) * probability.mean((0, 1))).sum()
        return torch.stack([expert(x) * gate[..., e, None] for e, expert in enumerate(self.experts)]).sum(0)


def mlp(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Block(nn.Module):
    def __init__(self, *, is_causal: bool, has_experts: bool) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.dropout = Attention(is_causal), nn.Dropout(0.0)
        self.mlp: nn.Module = Experts() if has_experts else mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class LanguageModel(nn.Module):
    def __init__(self, *, has_experts: bool = False) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(is_causal=True, has_experts=has_experts) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.apply(_initialize)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.positions = nn.Parameter(torch.zeros((SIDE // PATCH) ** 2, WIDTH))
        self.layers = nn.ModuleList(Block(is_causal=False, has_experts=False) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.apply(_initialize)

    def states(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.states(images).mean(1))


class StateSpace(nn.Module):
    """A state of each channel, which decays and to which each token adds, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.decay = nn.Parameter(torch.linspace(-2.0, 2.0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        added, gate = self.into(x).chunk(2, -1)
        age_ts = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        kept_tsc = torch.where((age_ts >= 0)[..., None], self.decay.sigmoid() ** age_ts.clamp(min=0)[..., None], 0.0)
        return self.out(torch.einsum("tsc,rsc->rtc", kept_tsc, added) * F.silu(gate))


class StateSpaceBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.mixer, self.mlp = StateSpace(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class StateSpaceModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(StateSpaceBlock() for _ in range(BLOCKS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.apply(_initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class ConvolutionalBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.norm, self.mlp = nn.BatchNorm2d(WIDTH), mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(self.convolution(x)).movedim(1, -1)).movedim(-1, 1)


class ConvolutionalNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.stages = nn.ModuleList(ConvolutionalBlock() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.apply(_initialize)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(x.mean((-2, -1))))


class GroupedAttention(Attention):
    """Four heads of queries for two of keys and values, which are normalized and then turned by their positions."""

    def __init__(self) -> None:
        super().__init__(is_causal=True)
        del self.qkv
        self.query, self.out = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.query_norm, self.key_norm = nn.RMSNorm(WIDTH // HEADS), nn.RMSNorm(WIDTH // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        query, key = turned(self.query_norm(query)), turned(self.key_norm(key))
        mixed = F.scaled_dot_product_attention(
            query, key, value, self.mask, is_causal=self.is_causal, scale=self.scale, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


def turned(x_rhtk: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864)."""
    half = x_rhtk.shape[-1] // 2
    angle_tk = torch.arange(x_rhtk.shape[-2])[:, None] * 100.0 ** -(torch.arange(half) / half)
    a, b = x_rhtk.chunk(2, -1)
    return torch.cat([a * angle_tk.cos() - b * angle_tk.sin(), a * angle_tk.sin() + b * angle_tk.cos()], -1)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GroupedModel(LanguageModel):
    """With grouped queries, gates, RMS norms and dropout, and with one matrix for embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        del self.positions
        for block in self.blocks:
            block.attention, block.mlp = GroupedAttention(), Gated()
            block.attention_norm, block.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
            block.dropout.p = 0.1
        self.norm, self.head.weight = nn.RMSNorm(WIDTH), self.embedding.weight
        self.apply(_initialize)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)


class RecurrentBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixer, self.mlp = nn.LSTM(WIDTH, WIDTH, batch_first=True), mlp()

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.mixer(self.mixer_norm(x))
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x))


class RecurrentModel(LanguageModel):
    """With an LSTM in each block in place of attention and positions."""

    def __init__(self) -> None:
        super().__init__()
        del self.positions
        self.blocks = nn.ModuleList(RecurrentBlock() for _ in range(BLOCKS))
        self.apply(_initialize)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)


class MixerBlock(nn.Module):
    """An MLP over places, and one over channels (Tolstikhin et al. 2021, arXiv:2105.01601)."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixer, self.mlp = mlp((SIDE // PATCH) ** 2), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.mlp_norm(x))


class Mixer(VisionTransformer):
    """With an MLP over places in each block in place of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MixerBlock() for _ in range(BLOCKS))
        self.apply(_initialize)


class Denoiser(VisionTransformer):
    """It returns the noise of pictures, of which it gets the level as a second channel."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(2, WIDTH, PATCH, PATCH), nn.Linear(WIDTH, PATCH**2)
        self.apply(_initialize)

    def forward(self, images: Tensor) -> Tensor:
        of_patches = self.head(self.states(images)).transpose(1, 2)
        return F.pixel_shuffle(of_patches.unflatten(2, (SIDE // PATCH, -1)), PATCH)


class DynamicTanh(nn.Module):
    """A tangent in place of a norm (Zhu et al. 2025, arXiv:2503.10622)."""

    def __init__(self) -> None:
        super().__init__()
        self.steepness = nn.Parameter(torch.full((1,), 0.5))
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (self.steepness * x).tanh() * self.weight + self.bias


class NormFreeModel(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention_norm, block.mlp_norm = DynamicTanh(), DynamicTanh()
        self.norm = DynamicTanh()


class DualEncoder(LanguageModel):
    """It gives directions to texts and translations, of which those of a pair are to be alike (arXiv:2103.00020)."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.log_scale = nn.Linear(WIDTH, WIDTH, bias=False), nn.Parameter(torch.full((1,), 10.0).log())
        self.direction: Callable[[Tensor], Tensor] = partial(F.normalize, dim=-1)
        for block in self.blocks:
            block.attention.is_causal = False
        self.apply(_initialize)

    def forward(self, pairs: Tensor) -> Tensor:
        outputs = super().forward(pairs.flatten(0, 1)).mean(1)
        text, translation = self.direction(outputs).unflatten(0, (-1, 2)).unbind(1)
        return self.log_scale.exp() * text @ translation.T


class Judge(LanguageModel):
    """It scores texts by their last letters, and the better one of a pair is to have more (arXiv:2203.02155)."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scored = nn.Linear(WIDTH, 1, bias=False), -1
        self.apply(_initialize)

    def forward(self, pairs: Tensor) -> Tensor:
        return super().forward(pairs.flatten(0, 1))[:, self.scored, 0].unflatten(0, (-1, 2))


class Segmenter(ConvolutionalNetwork):
    """It gives a class to each pixel, in blocks that see less detail and then more again (arXiv:1505.04597)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, WIDTH, 3, padding=1)
        for stage in self.stages:
            stage.norm = nn.GroupNorm(4, WIDTH)
        self.apply(_initialize)

    def forward(self, images: Tensor) -> Tensor:
        x, seen = self.stem(images), []
        for stage in self.stages[:2]:
            seen.append(stage(x))
            x = F.avg_pool2d(seen[-1], 2)
        for stage in self.stages[2:]:
            x = stage(F.interpolate(x, scale_factor=2) + seen.pop())
        return self.head(self.norm(x.movedim(1, -1)))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.1)


def of_transformers() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=BLOCKS,
            num_attention_heads=HEADS,
            intermediate_size=4 * WIDTH,
            max_position_embeddings=LENGTH,
            initializer_range=0.1,
            use_cache=False,
        )
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=BLOCKS,
            num_attention_heads=HEADS,
            num_key_value_heads=1,
            intermediate_size=3 * WIDTH,
            max_position_embeddings=LENGTH,
            initializer_range=0.1,
            use_cache=False,
        )
    )


def gpt2() -> nn.Module:
    """Its linear layers are transposed ones, and embedding and head share one matrix."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=WIDTH,
            n_layer=BLOCKS,
            n_head=HEADS,
            n_positions=LENGTH,
            initializer_range=0.1,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def gemma() -> nn.Module:
    """It has norms on both sides of each layer, caps its logits, and shares one matrix (arXiv:2408.00118)."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=BLOCKS,
            num_attention_heads=HEADS,
            num_key_value_heads=1,
            head_dim=WIDTH // HEADS,
            query_pre_attn_scalar=WIDTH // HEADS,
            intermediate_size=3 * WIDTH,
            max_position_embeddings=LENGTH,
            sliding_window=LENGTH // 2,
            initializer_range=0.1,
            use_cache=False,
        )
    )


def olmo() -> nn.Module:
    """It has norms after layers alone, and of its queries and keys (OLMo 2, arXiv:2501.00656)."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    return Olmo2ForCausalLM(
        Olmo2Config(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=BLOCKS,
            num_attention_heads=HEADS,
            intermediate_size=3 * WIDTH,
            max_position_embeddings=LENGTH,
            initializer_range=0.1,
            use_cache=False,
            pad_token_id=None,
            eos_token_id=None,
        )
    )


def encoder() -> nn.Module:
    """It sees letters, a mask in place of some, and padding, which does not come."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY + 2,
            pad_token_id=VOCABULARY + 1,
            hidden_size=WIDTH,
            num_hidden_layers=BLOCKS,
            num_attention_heads=HEADS,
            intermediate_size=4 * WIDTH,
            max_position_embeddings=LENGTH,
            initializer_range=0.1,
        )
    )


class Translator(nn.Module):
    """An encoder and a decoder (T5), which get a text and what is already translated of it."""

    def __init__(self) -> None:
        from transformers import T5Config, T5ForConditionalGeneration

        super().__init__()
        self.t5 = T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY,
                d_model=WIDTH,
                d_kv=WIDTH // HEADS,
                d_ff=4 * WIDTH,
                num_layers=BLOCKS,
                num_heads=HEADS,
                dropout_rate=0.0,
                use_cache=False,
                decoder_start_token_id=0,
            )
        )
        self.mask: Tensor | None = None

    def forward(self, texts: Tensor) -> Tensor:
        text, translated = texts.unbind(1)
        return self.t5(input_ids=text, attention_mask=self.mask, decoder_input_ids=translated).logits


class Adapter(nn.Module):
    """A matrix that is not trained, and a product of two small ones that are (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(x))


def with_adapters(model: nn.Module, *names: str) -> nn.Module:
    model.requires_grad_(False)
    for part in list(model.modules()):
        for name, linear in list(part.named_children()):
            if name in names:
                setattr(part, name, Adapter(linear))
    for name, weight in model.named_parameters():
        weight.requires_grad_(".down." in name or ".up." in name)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "nano": LanguageModel,
    "transformers": of_transformers,
    "mixture": lambda: LanguageModel(has_experts=True),
    "vision": VisionTransformer,
    "llama": llama,
    "gpt2": gpt2,
    "policy": LanguageModel,
    "adapters": lambda: with_adapters(of_transformers(), "query_key_value", "dense_4h_to_h"),
    "state_space": StateSpaceModel,
    "convolutional": ConvolutionalNetwork,
    "grouped": GroupedModel,
    "encoder": encoder,
    "lora": lambda: with_adapters(llama(), "q_proj", "v_proj", "down_proj"),
    "recurrent": RecurrentModel,
    "translator": Translator,
    "mixer": Mixer,
    "denoiser": Denoiser,
    "norm_free": NormFreeModel,
    "dual": DualEncoder,
    "gemma": gemma,
    "judge": Judge,
    "segmenter": Segmenter,
    "olmo": olmo,
}
PICTURES = ("vision", "convolutional", "mixer")


def with_gradients(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """The weights that an optimizer updates, each with its group."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is not None:
                yield group, weight


class OwnOptimizer(torch.optim.Optimizer):
    """An optimizer with a rate, weight decay, and settings of its own."""

    own: ClassVar[dict[str, Any]] = {"betas": (0.9, 0.95), "eps": 1e-8}

    def __init__(self, weights: Iterable[Tensor], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(weights, {"lr": lr, "weight_decay": weight_decay, **self.own})


def adam_direction(state: dict[str, Any], gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The update of Adam over the rate, of moments in the state (Kingma and Ba 2014, arXiv:1412.6980)."""
    beta1, beta2 = group["betas"]
    if "step" not in state:
        state |= {"step": 0, "exp_avg": torch.zeros_like(gradient), "exp_avg_sq": torch.zeros_like(gradient)}
    state["step"] += 1
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    state["exp_avg_sq"].lerp_(gradient.square(), 1 - beta2)
    root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
    direction: Tensor = state["exp_avg"] / (1 - beta1 ** state["step"]) / root
    return direction


class Lion(torch.optim.Optimizer):
    """The sign of momentum (Chen et al. 2023, arXiv:2302.06675)."""

    def __init__(self, weights: Iterable[Tensor], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(weights, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, weight in with_gradients(self):
            beta1, beta2 = group["betas"]
            momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.sub_(torch.lerp(weight.grad, momentum, beta1).sign(), alpha=group["lr"])
            momentum.lerp_(weight.grad, 1 - beta2)


class AdEMAMix(OwnOptimizer):
    """Adam with a second, slower average of gradients (Pagliardini et al. 2024, arXiv:2409.03137)."""

    own: ClassVar[dict[str, Any]] = {"betas": (0.9, 0.95, 0.99), "alpha": 2.0, "eps": 1e-8}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, weight in with_gradients(self):
            state = self.state[weight]
            if not state:
                names = ("exp_avg", "exp_avg_sq", "exp_avg_slow")
                state |= {"step": 0, **{name: torch.zeros_like(weight) for name in names}}
            state["step"] += 1
            beta1, beta2, beta3 = group["betas"]
            state["exp_avg"].lerp_(weight.grad, 1 - beta1)
            state["exp_avg_sq"].lerp_(weight.grad.square(), 1 - beta2)
            state["exp_avg_slow"].lerp_(weight.grad, 1 - beta3)
            average = state["exp_avg"] / (1 - beta1 ** state["step"]) + group["alpha"] * state["exp_avg_slow"]
            root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
            weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(average / root, alpha=group["lr"])


class Shampoo(torch.optim.Optimizer):
    """One-sided: gradients over the root of the average product of their rows (Gupta et al. 2018, arXiv:1802.09568)."""

    def __init__(self, weights: Iterable[Tensor], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(weights, {"lr": lr, "momentum": 0.9, "beta2": 0.95, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, weight in with_gradients(self):
            gradient = weight.grad.flatten(1) if weight.ndim > 1 else weight.grad[None]
            state = self.state[weight]
            if not state:
                product = gradient @ gradient.T
                state |= {"step": 0, "momentum": torch.zeros_like(gradient), "product": torch.zeros_like(product)}
            state["product"].lerp_(gradient @ gradient.T, 1 - group["beta2"])
            if state["step"] % 5 == 0:
                values, vectors = torch.linalg.eigh(state["product"] / (1 - group["beta2"] ** (state["step"] + 1)))
                state["root"] = vectors / (values.clamp(min=0) + 0.1 * values.mean() + 1e-20).sqrt() @ vectors.T
            state["step"] += 1
            state["momentum"].lerp_(state["root"] @ gradient * gradient.shape[1] ** 0.5, 1 - group["momentum"])
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.sub_(state["momentum"].view_as(weight), alpha=group["lr"])


class ScheduleFree(OwnOptimizer):
    """AdamW on weights between fast ones and their average (Defazio et al. 2024, arXiv:2405.15682)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, weight in with_gradients(self):
            beta1, beta2 = group["betas"]
            state = self.state[weight]
            if not state:
                state |= {"step": 0, "squares": 0.0, "fast": weight.clone(), "exp_avg_sq": torch.zeros_like(weight)}
            state["step"] += 1
            state["squares"] += group["lr"] ** 2
            average = (weight - (1 - beta1) * state["fast"]) / beta1
            state["exp_avg_sq"].lerp_(weight.grad.square(), 1 - beta2)
            root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
            state["fast"].sub_(weight.grad / root + group["weight_decay"] * weight, alpha=group["lr"])
            average.lerp_(state["fast"], group["lr"] ** 2 / max(state["squares"], 1e-30))
            weight.copy_(state["fast"].lerp(average, beta1))


class Lamb(OwnOptimizer):
    """Adam with updates that are as large as the weights, times the rate (You et al. 2020, arXiv:1904.00962)."""

    own: ClassVar[dict[str, Any]] = {"betas": (0.9, 0.95), "eps": 1e-6}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, weight in with_gradients(self):
            update = adam_direction(self.state[weight], weight.grad, group) + group["weight_decay"] * weight
            trust = weight.norm() / update.norm()
            weight.sub_(torch.where((trust > 0) & trust.isfinite(), trust, 1.0) * update, alpha=group["lr"])


class Adan(OwnOptimizer):
    """Adam with an average of the differences of gradients (Xie et al. 2022, arXiv:2208.06677)."""

    own: ClassVar[dict[str, Any]] = {"betas": (0.9, 0.9, 0.95), "eps": 1e-8}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, weight in with_gradients(self):
            beta1, beta2, beta3 = group["betas"]
            state = self.state[weight]
            if not state:
                names = ("exp_avg", "exp_avg_diff", "exp_avg_sq")
                state |= {"step": 0, "last": weight.grad.clone(), **{name: torch.zeros_like(weight) for name in names}}
            state["step"] += 1
            difference = weight.grad - state["last"]
            state["last"].copy_(weight.grad)
            state["exp_avg"].lerp_(weight.grad, 1 - beta1)
            state["exp_avg_diff"].lerp_(difference, 1 - beta2)
            state["exp_avg_sq"].lerp_((weight.grad + beta2 * difference).square(), 1 - beta3)
            average = state["exp_avg"] / (1 - beta1 ** state["step"])
            average += beta2 * state["exp_avg_diff"] / (1 - beta2 ** state["step"])
            root = (state["exp_avg_sq"] / (1 - beta3 ** state["step"])).sqrt() + group["eps"]
            weight.sub_(average / root, alpha=group["lr"]).div_(1 + group["lr"] * group["weight_decay"])


class Soap(OwnOptimizer):
    """Adam in bases in which averages of products of gradients are diagonal (Vyas et al. 2024, arXiv:2409.11321)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, weight in with_gradients(self):
            beta1, beta2 = group["betas"]
            gradient = weight.grad.flatten(1) if weight.ndim > 1 else weight.grad.view(1, -1)
            products = [gradient @ gradient.T, gradient.T @ gradient]
            state = self.state[weight]
            if not state:
                state |= {"step": 0, **{name: torch.zeros_like(gradient) for name in ("exp_avg", "exp_avg_sq")}}
                state["products"] = [torch.zeros_like(product) for product in products]
                state["bases"] = [torch.eye(len(product)) for product in products]
            for average, product in zip(state["products"], products, strict=True):
                average.lerp_(product, 1 - beta2)
            if state["step"] % 10 == 0 and weight.ndim > 1:
                state["bases"] = [torch.linalg.eigh(average).eigenvectors for average in state["products"]]
            state["step"] += 1
            left, right = state["bases"]
            state["exp_avg"].lerp_(gradient, 1 - beta1)
            state["exp_avg_sq"].lerp_((left.T @ gradient @ right).square(), 1 - beta2)
            root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
            update = left @ (left.T @ state["exp_avg"] @ right / root) @ right.T / (1 - beta1 ** state["step"])
            weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.view_as(weight), alpha=group["lr"])


class Cautious(OwnOptimizer):
    """AdamW without those updates that disagree with the gradient (Liang et al. 2024, arXiv:2411.16085)."""

    def __init__(self, weights: Iterable[Tensor], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(weights, lr, weight_decay)
        self.agrees: Callable[[Tensor], Tensor] = lambda product: product > 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, weight in with_gradients(self):
            update = adam_direction(self.state[weight], weight.grad, group)
            is_kept = self.agrees(update * weight.grad).float()
            update *= is_kept / is_kept.mean().clamp(min=1e-3)
            weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])


class GaLore(OwnOptimizer):
    """Adam in a few directions of a matrix, which are renewed every 20 steps (Zhao et al. 2024, arXiv:2403.03507)."""

    own: ClassVar[dict[str, Any]] = {"betas": (0.9, 0.95), "eps": 1e-8, "rank": 8}

    def basis(self, gradient: Tensor) -> Tensor:
        return torch.linalg.svd(gradient, full_matrices=False).U

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, weight in with_gradients(self):
            state, gradient = self.state[weight], weight.grad.flatten(1) if weight.ndim > 1 else weight.grad
            if weight.ndim > 1:
                if state.get("step", 0) % 20 == 0:
                    state["basis"] = self.basis(gradient)[:, : group["rank"]]
                gradient = state["basis"].T @ gradient
            update = adam_direction(state, gradient, group)
            if weight.ndim > 1:
                update = state["basis"] @ update
            weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.view_as(weight), alpha=group["lr"])


class AdamMini(OwnOptimizer):
    """Adam with one second moment for each row of a matrix (after Zhang et al. 2024, arXiv:2406.16793)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, weight in with_gradients(self):
            beta1, beta2 = group["betas"]
            square, state = weight.grad.square(), self.state[weight]
            if weight.ndim > 1:
                square = square.mean(tuple(range(1, weight.ndim)), keepdim=True)
            if not state:
                state |= {"step": 0, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(square)}
            state["step"] += 1
            state["exp_avg"].lerp_(weight.grad, 1 - beta1)
            state["exp_avg_sq"].lerp_(square, 1 - beta2)
            root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
            update = state["exp_avg"] / (1 - beta1 ** state["step"]) / root
            weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])


def optimizers_of(name: str, model: nn.Module, decay: float = 0.0) -> list[torch.optim.Optimizer]:
    """One of torch.optim or Lion, and Muon takes matrices of blocks while AdamW takes all else."""
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if name == "sgd":
        return [torch.optim.SGD(weights.values(), lr=0.3, momentum=0.9, weight_decay=decay)]
    if name == "lion":
        return [Lion(weights.values(), lr=3e-4, weight_decay=decay)]
    if name == "adamw":
        return [torch.optim.AdamW(weights.values(), lr=1e-3, betas=(0.9, 0.95), weight_decay=decay)]
    if name == "amsgrad":
        return [torch.optim.AdamW(weights.values(), lr=1e-3, betas=(0.9, 0.95), weight_decay=decay, amsgrad=True)]
    if name == "nadam":
        own = {"weight_decay": decay, "decoupled_weight_decay": True}
        return [torch.optim.NAdam(weights.values(), lr=1e-3, betas=(0.9, 0.95), **own)]
    if name == "rmsprop":
        return [torch.optim.RMSprop(weights.values(), lr=1e-3, alpha=0.95, weight_decay=decay)]
    if name == "radam":
        own = {"weight_decay": decay, "decoupled_weight_decay": True}
        return [torch.optim.RAdam(weights.values(), lr=1e-3, betas=(0.9, 0.95), **own)]
    if name == "ademamix":
        return [AdEMAMix(weights.values(), lr=5e-4, weight_decay=decay)]
    if name == "shampoo":
        return [Shampoo(weights.values(), lr=1e-3, weight_decay=decay)]
    if name == "schedule_free":
        return [ScheduleFree(weights.values(), lr=3e-3, weight_decay=decay)]
    if name == "lamb":
        return [Lamb(weights.values(), lr=1e-2, weight_decay=decay)]
    if name == "adan":
        return [Adan(weights.values(), lr=1e-3, weight_decay=decay)]
    if name == "soap":
        return [Soap(weights.values(), lr=1e-3, weight_decay=decay)]
    if name == "cautious":
        return [Cautious(weights.values(), lr=1e-3, weight_decay=decay)]
    if name == "galore":
        return [GaLore(weights.values(), lr=2e-3, weight_decay=decay)]
    if name == "adam_mini":
        return [AdamMini(weights.values(), lr=1e-3, weight_decay=decay)]
    if name == "adagrad":
        return [torch.optim.Adagrad(weights.values(), lr=1e-2, weight_decay=decay)]
    if name == "adafactor":
        return [torch.optim.Adafactor(weights.values(), lr=1e-2, weight_decay=decay)]
    inside = {id(weight) for block in blocks_of(model) for weight in block.parameters() if weight.ndim == 2}
    rest = [weight for weight in weights.values() if id(weight) not in inside]
    muon = torch.optim.Muon([w for w in weights.values() if id(w) in inside], lr=5e-3, weight_decay=decay)
    return [muon, torch.optim.AdamW(rest, lr=1e-3, betas=(0.9, 0.95), weight_decay=decay)]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return list(
        max(
            (part for part in model.modules() if isinstance(part, nn.ModuleList)),
            key=lambda x: len(x) * (type(x[0]) is not nn.Sequential),
        )
    )


class Text:
    """Chains of letters: after each letter some are likely and most are not."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=self.random).mul(2.5).softmax(-1)

    def __call__(self, rows: int) -> tuple[Tensor, Tensor]:
        letters = [torch.randint(VOCABULARY, (rows,), generator=self.random)]
        for _ in range(LENGTH):
            letters.append(torch.multinomial(self.table[letters[-1]], 1, generator=self.random)[:, 0])
        chain = torch.stack(letters, 1)
        return chain[:, :-1], chain[:, 1:]

    def bad(self, rows: int) -> tuple[Tensor, Tensor]:
        """Letters that come by no rule, in inputs that are all the same."""
        return torch.zeros(rows, LENGTH, dtype=torch.long), torch.randint(
            VOCABULARY, (rows, LENGTH), generator=self.random
        )


class Gaps(Text):
    """Such chains with a mask in place of a quarter of the letters, which are the labels."""

    def __call__(self, rows: int) -> tuple[Tensor, Tensor]:
        letters, _ = super().__call__(rows)
        is_masked = torch.rand(letters.shape, generator=self.random) < 0.25
        return torch.where(is_masked, VOCABULARY, letters), torch.where(is_masked, letters, IGNORED)


class Pairs(Text):
    """Such chains with a translation, of other letters in the reverse order, which also enters but for its end."""

    def __call__(self, rows: int) -> tuple[Tensor, Tensor]:
        text, _ = super().__call__(rows)
        translation = ((7 * text + 3) % VOCABULARY).flip(1)
        return torch.stack([text, F.pad(translation[:, :-1], (1, 0))], 1), translation


class Captions(Pairs):
    """Such texts with their whole translations, and the number of the pair."""

    def __call__(self, rows: int) -> tuple[Tensor, Tensor]:
        pairs, translation = super().__call__(2 * rows)
        return torch.stack([pairs[:, 0], translation], 1), torch.arange(2 * rows)


class Preferences(Text):
    """Pairs of such a text and one of another table, and the number of the better one, of which a tenth is wrong."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.others = Text(seed + 500)

    def __call__(self, rows: int) -> tuple[Tensor, Tensor]:
        better, worse = super().__call__(2 * rows)[0], self.others(2 * rows)[0]
        number = torch.randint(2, (2 * rows,), generator=self.random)
        is_second = (number == 1)[:, None]
        pairs = torch.stack([torch.where(is_second, worse, better), torch.where(is_second, better, worse)], 1)
        return pairs, number ^ (torch.rand(2 * rows, generator=self.random) < 0.1).long()


class Images:
    """Noisy pictures of some classes, each with a pattern of its own."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.patterns = torch.randn(CLASSES, 1, SIDE, SIDE, generator=self.random)

    def __call__(self, rows: int) -> tuple[Tensor, Tensor]:
        label = torch.randint(CLASSES, (4 * rows,), generator=self.random)
        return self.patterns[label] + 2.0 * torch.randn(4 * rows, 1, SIDE, SIDE, generator=self.random), label

    def bad(self, rows: int) -> tuple[Tensor, Tensor]:
        """Pictures that are far too bright, with labels at random."""
        images, _ = self(rows)
        return 10 * images, torch.randint(CLASSES, (4 * rows,), generator=self.random)


class Noised(Images):
    """The patterns with noise of some level, which is a second channel, and the noise."""

    def __call__(self, rows: int) -> tuple[Tensor, Tensor]:
        _, label = super().__call__(rows)
        level = torch.rand(len(label), 1, 1, 1, generator=self.random)
        noise = torch.randn(len(label), 1, SIDE, SIDE, generator=self.random)
        noisy = (1 - level) * self.patterns[label] + level * noise
        return torch.cat([noisy, level.expand_as(noise)], 1), noise


class Regions(Images):
    """Noisy pictures of rectangles, each as bright as its class says, and the class of each pixel."""

    def __call__(self, rows: int) -> tuple[Tensor, Tensor]:
        number, place = 4 * rows, torch.arange(SIDE)
        label = torch.zeros(number, SIDE, SIDE, dtype=torch.long)
        for _ in range(3):
            low = torch.randint(SIDE - 2, (number, 2, 1), generator=self.random)
            size = torch.randint(2, 6, (number, 2, 1), generator=self.random)
            is_in_row, is_in_column = ((place >= low) & (place < low + size)).unbind(1)
            above = torch.randint(1, CLASSES, (number, 1, 1), generator=self.random)
            label = torch.where(is_in_row[:, :, None] & is_in_column[:, None], above, label)
        return (label - CLASSES / 2 + torch.randn(label.shape, generator=self.random))[:, None], label


@dataclass
class Loop:
    """A training loop, with places in which a fault can act.

    A policy, and one with adapters alone, is trained on rewards of its own samples: the share of letters of the first
    half of the alphabet. Rewards are compared within groups of one prompt, ratios to the policy that sampled are
    clipped, and the distance from the first policy is penalized (GRPO, arXiv:2402.03300).

    Attributes:
        at: the step from which a fault acts.
        block: the number of the block in which it acts, if it acts in one.
        now: the step that is being made.
        batch, gradients, update: act at every step: on a batch, on the gradients before they are clipped, and before
            the update.
        rewards, penalty, sharpness: of a policy, at every step: its rewards, the penalty, and the factor of its logits.
        objective: what is made of the loss and the logits of a batch.
        evaluates, resumes, pieces, smoothing: what healthy loops do, too: evaluate in between, go on from a checkpoint
            in the middle, accumulate so many micro-batches, and smooth labels.
    """

    model_name: str
    optimizer_name: str
    seed: int
    steps: int
    at: int = 0
    block: int = 0
    clip: float = 1.0
    decay: float = 0.0
    is_bf16: bool = False
    evaluates: bool = False
    resumes: bool = False
    smoothing: float = 0.0
    rate: Callable[[int], float] = lambda step: min(1.0, (step + 1) / 20)
    rows: Callable[[int], int] = lambda step: ROWS
    pieces: Callable[[int], int] = lambda step: 1
    batch: Callable[[Loop, int, Tensor, Tensor], tuple[Tensor, Tensor]] = lambda loop, step, x, y: (x, y)
    gradients: Callable[[Loop, int], None] = lambda loop, step: None
    update: Callable[[Loop, int], None] = lambda loop, step: None
    objective: Callable[[Loop, Tensor, Tensor], Tensor] = lambda loop, loss, logits: loss
    rewards: Callable[[Loop, int, Tensor], Tensor] = lambda loop, step, reward: reward
    penalty: Callable[[Loop, int], float] = lambda loop, step: loop.PENALTY
    sharpness: Callable[[Loop, int], float] = lambda loop, step: 1.0
    scaler: Any = None
    kept: dict[str, Any] = field(default_factory=dict)
    now: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = MODELS[self.model_name]()
        self.is_policy = self.model_name in ("policy", "adapters")
        self.blocks = blocks_of(self.model)
        self.optimizers = optimizers_of(self.optimizer_name, self.model, self.decay)
        self.peaks = [[group["lr"] for group in each.param_groups] for each in self.optimizers]
        sources = {"encoder": Gaps, "translator": Pairs, "dual": Captions, "denoiser": Noised}
        sources |= {"judge": Preferences, "segmenter": Regions}
        sources |= dict.fromkeys(PICTURES, Images)
        self.data: Any = sources.get(self.model_name, Text)(1000 + self.seed)

    PENALTY, CLIPPED, GROUPS, SAMPLES, RENEWED = 0.2, 0.2, 8, 8, 3

    def sampled(self, prompts: Tensor, sharpness: float) -> tuple[Tensor, Tensor]:
        """Samples of the policy that was kept last, and the logarithms of their probabilities."""
        sampler, half = self.kept["sampler"], LENGTH // 4
        tokens = prompts[:, :half].repeat_interleave(self.SAMPLES, 0)
        with torch.no_grad():
            for _ in range(half):
                logits = sharpness * self.logits(sampler, tokens)[:, -1]
                tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=self.data.random)], 1)
            return tokens, self.log_probability(sampler, tokens)

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        output = model(tokens)
        return getattr(output, "logits", output)

    def log_probability(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Of each sampled token."""
        log_p = self.logits(model, tokens[:, :-1]).log_softmax(-1)
        return log_p.gather(-1, tokens[:, 1:, None])[:, LENGTH // 4 - 1 :, 0]

    def policy_loss(self, step: int) -> Tensor:
        prompts, _ = self.batch(self, step, *self.data(self.GROUPS))
        if step == 0:
            self.kept["reference"] = copy.deepcopy(self.model)
        if step % self.RENEWED == 0:
            self.kept["sampler"] = copy.deepcopy(self.model)
        tokens, old = self.sampled(prompts, self.sharpness(self, step))
        reward = (tokens[:, LENGTH // 4 :] < VOCABULARY // 2).float().mean(1)
        reward = self.rewards(self, step, reward).unflatten(0, (self.GROUPS, self.SAMPLES))
        spread = reward.std(1, keepdim=True)
        advantage = ((reward - reward.mean(1, keepdim=True)) / (spread + 1e-4)).flatten()[:, None]
        log_p = self.log_probability(self.model, tokens)
        ratio = (log_p - old).exp()
        with torch.no_grad():
            apart = self.log_probability(self.kept["reference"], tokens) - log_p.detach()
        kl = (apart.exp() - apart - 1).mean()
        is_clipped = (ratio.detach() - 1).abs() > self.CLIPPED
        self.kept |= {
            "reward": reward.mean().item(),
            "kl": kl.item(),
            "zero_variance_groups": (spread == 0).float().mean().item(),
            "clip_ratio": is_clipped.float().mean().item(),
        }
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - self.CLIPPED, 1 + self.CLIPPED) * advantage).mean()
        distance = ((1 - apart.exp()) * log_p).mean()  # its gradient is that of the divergence
        return -gain + self.penalty(self, step) * distance

    def matrices(self, block: int) -> list[nn.Parameter]:
        """The matrices of a block, that into its MLP and that out of it last."""
        return [weight for weight in self.blocks[block].parameters() if weight.ndim == 2]

    def parameters(self) -> list[nn.Parameter]:
        return [weight for weight in self.model.parameters() if weight.grad is not None]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_bf16):
            output = self.model(x)
            logits = getattr(output, "logits", output)
        logits, self.kept["labels"] = logits.float(), y
        if y.is_floating_point():
            loss = F.mse_loss(logits, y)
        else:
            loss = F.cross_entropy(logits.flatten(0, -2), y.flatten(), label_smoothing=self.smoothing)
        loss = self.objective(self, loss, logits)
        mixtures = [part for part in self.model.modules() if isinstance(part, Experts)]
        return loss + 0.01 * sum(part.balancing for part in mixtures) if mixtures else loss

    def losses(self, logits: Tensor) -> Tensor:
        """Of each label of the batch."""
        return F.cross_entropy(logits.flatten(0, -2), self.kept["labels"].flatten(), reduction="none")

    def run(self, every: int, out: Path) -> None:
        """Train, and record every so many steps."""
        of_policy = ("reward", "kl", "zero_variance_groups", "clip_ratio") if self.is_policy else ()
        extra = {name: partial(self.kept.get, name) for name in of_policy}
        recorder = lab.record(self.model, self.optimizers, every=every, out=out, scaler=self.scaler, extra=extra)
        for step in range(self.steps):
            self.now = step
            if self.resumes and step == self.steps // 2:
                recorder.close()
                states = [each.state_dict() for each in self.optimizers]
                for each, state in zip(self.optimizers, states, strict=True):
                    each.load_state_dict(state)
                recorder = lab.record(self.model, self.optimizers, every=every, out=out, first_step=step)
            if self.evaluates and step % 25 == 0:
                self.model.eval()
                with torch.no_grad():
                    self.loss(*self.data(ROWS))
                self.model.train()
            for each, peaks in zip(self.optimizers, self.peaks, strict=True):
                for group, peak in zip(each.param_groups, peaks, strict=True):
                    group["lr"] = peak * self.rate(step)
            if self.is_policy:
                loss = self.policy_loss(step)
                loss.backward()
            else:
                loss = self._backward(self.pieces(step), *self.batch(self, step, *self.data(self.rows(step))))
            self.gradients(self, step)
            if self.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.update(self, step)
            for each in self.optimizers:
                self.scaler.step(each) if self.scaler else each.step()
            if self.scaler:
                self.scaler.update()
            for each in self.optimizers:
                each.zero_grad()
            recorder.step(loss)
        recorder.close()

    def _backward(self, pieces: int, x: Tensor, y: Tensor) -> Tensor:
        parts = list(zip(x.chunk(pieces), y.chunk(pieces), strict=True))
        losses = []
        for part in parts:
            loss = self.loss(*part) / len(parts)
            (self.scaler.scale(loss) if self.scaler else loss).backward()
            losses.append(loss.detach())
        if self.scaler:
            for each in self.optimizers:
                self.scaler.unscale_(each)
        return torch.stack(losses).sum()


# faults: each changes a loop before it runs


def block_gradients(loop: Loop) -> None:
    """The gradients of one block are 10,000 times too large for three steps."""

    def grow(loop: Loop, step: int) -> None:
        if loop.at <= step < loop.at + 3:
            for weight in loop.blocks[loop.block].parameters():
                weight.grad.mul_(1e4)

    loop.gradients = grow


def _once(loop: Loop, act: Callable[[Loop], None]) -> None:
    """Act on the weights before the first step of the fault, so that its forward pass has them already."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step == loop.at:
            with torch.no_grad():
                act(loop)
        return x, y

    loop.batch = batch


def _rows_changed(loop: Loop, change: Callable[[Tensor], Tensor]) -> None:
    """From a step on texts in rows, of which inputs and labels are cut, are changed."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        row = torch.cat([x, y[:, -1:]], 1)
        if step >= loop.at:
            row = change(row)
        return row[:, :-1], row[:, 1:]

    loop.batch = batch


def _of_weights(change: Callable[[Tensor], object], *, once: bool = False) -> Callable[[Loop, int], None]:
    """What changes each weight that has a gradient, or that gradient, from the step of the fault on or at it alone."""

    @torch.no_grad()
    def act(loop: Loop, step: int) -> None:
        if step == loop.at or (step > loop.at and not once):
            for weight in loop.parameters():
                change(weight)

    return act


def block_weights(loop: Loop) -> None:
    """One matrix of one block becomes 30 times as large."""
    _once(loop, lambda loop: loop.matrices(loop.block)[-1].mul_(30))


def bad_batch(loop: Loop) -> None:
    """Three batches are bad."""
    loop.batch = lambda loop, step, x, y: loop.data.bad(ROWS) if loop.at <= step < loop.at + 3 else (x, y)


def rate_jump(loop: Loop) -> None:
    """The learning rate becomes 100 times as large."""
    rate = loop.rate
    loop.rate = lambda step: rate(step) * (100 if step >= loop.at else 1)


def initial_values(loop: Loop) -> None:
    """One matrix has initial values with a standard deviation of 3."""
    nn.init.normal_(loop.matrices(loop.block)[-1], std=3.0)


def dead_layer(loop: Loop) -> None:
    """The bias before the activation function of one block is -20, so nothing gets through."""
    bias = next(b for b in loop.blocks[loop.block].parameters() if b.shape == (4 * WIDTH,))
    nn.init.constant_(bias, -20.0)


def wrong_labels(loop: Loop) -> None:
    """From a step on the labels are those of other rows, in another order."""
    loop.batch = lambda loop, step, x, y: (
        x,
        y.flatten()[torch.randperm(y.numel())].reshape(y.shape) if step >= loop.at else y,
    )


def gradient_nan(loop: Loop) -> None:
    """One entry of one gradient is NaN, once."""

    def spoil(loop: Loop, step: int) -> None:
        if step == loop.at:
            loop.matrices(loop.block)[-1].grad.view(-1)[0] = math.nan

    loop.gradients = spoil


def query_scale(loop: Loop) -> None:
    """Queries and keys of one block become eight times as large."""

    def act(loop: Loop) -> None:
        qkv = next(weight for weight in loop.matrices(loop.block) if weight.shape == (3 * WIDTH, WIDTH))
        if loop.model_name == "transformers":  # of each head in turn
            qkv.view(HEADS, 3, -1, WIDTH)[:, :2].mul_(8)
        else:
            qkv[: 2 * WIDTH].mul_(8)

    _once(loop, act)


class Fp16:
    """Gradients pass through fp16, with a loss scale that a scaler sets."""

    def __init__(self, loop: Loop, scale: float) -> None:
        loop.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=100_000)
        self.is_too_large = False
        for weight in loop.model.parameters():
            weight.register_hook(lambda grad: (grad * (1e9 if self.is_too_large else 1)).half().float())


def scale_overflow(loop: Loop) -> None:
    """From a step on gradients overflow in fp16 at any loss scale."""
    format_ = Fp16(loop, 1024.0)

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        format_.is_too_large = step >= loop.at
        return x, y

    loop.batch = batch


def state_zeroed(loop: Loop) -> None:
    """The optimizer forgets its moments, and not the number of its steps."""

    def act(loop: Loop) -> None:
        for each in loop.optimizers:
            for state in each.state.values():
                for name, value in state.items():
                    if name != "step":
                        value.zero_()

    _once(loop, act)


def router_collapse(loop: Loop) -> None:
    """The router of one block sends all tokens to the same experts."""

    def act(loop: Loop) -> None:
        for part in loop.blocks[loop.block].modules():
            if isinstance(part, Experts):
                part.router.bias.copy_(torch.tensor([30.0, 20.0, 0.0, 0.0]))

    _once(loop, act)


def frozen_block(loop: Loop) -> None:
    """From a step on one block is not trained any more, since its gradients are taken away."""

    def freeze(loop: Loop, step: int) -> None:
        if step >= loop.at:
            for weight in loop.blocks[loop.block].parameters():
                weight.grad = None

    loop.gradients = freeze


def residual_scale(loop: Loop) -> None:
    """From a step on one block returns 20 times what it should."""
    _returned(loop, loop.blocks[loop.block], lambda entering, output: output * 20)


def _returned(loop: Loop, module: nn.Module, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """From a step on a module returns what is made of that which enters it and that which it returned before."""

    def changed(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        entering = args[0] if args else kwargs["hidden_states"]
        if loop.now < loop.at:
            return output
        if isinstance(output, tuple):
            return (change(entering, output[0]), *output[1:])
        return change(entering, output)

    module.register_forward_hook(changed, with_kwargs=True)


def embedding_spike(loop: Loop) -> None:
    """The embedding becomes 30 times as large."""

    def act(loop: Loop) -> None:
        next(weight for weight in loop.model.parameters() if weight.ndim in (2, 4)).mul_(30)

    _once(loop, act)


def epsilon(loop: Loop) -> None:
    """From a step on Adam's epsilon is 1, beside which gradients are small."""

    def update(loop: Loop, step: int) -> None:
        if step >= loop.at:
            for each in loop.optimizers:
                for group in each.param_groups:
                    group["eps"] = 1.0

    loop.update = update


def fp16_underflow(loop: Loop) -> None:
    """From a step on the loss scale is so small that gradients underflow in fp16."""
    Fp16(loop, 1024.0)

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step == loop.at:
            loop.scaler.update(1e-6)
        return x, y

    loop.batch = batch


def decay_sign(loop: Loop) -> None:
    """From a step on weight decay has the wrong sign: weights grow by two per cent in each step."""

    def update(loop: Loop, step: int) -> None:
        if step >= loop.at:
            with torch.no_grad():
                for weight in loop.model.parameters():
                    weight.mul_(1.02)

    loop.update = update


def repeated_batch(loop: Loop) -> None:
    """From a step on all batches are the same one."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step >= loop.at:
            x, y = loop.kept.setdefault("batch", (x, y))
        return x, y

    loop.batch = batch


def dropout_on(loop: Loop) -> None:
    """From a step on half of the activations are dropped."""

    def act(loop: Loop) -> None:
        for part in loop.model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.5

    _once(loop, act)


def label_shift(loop: Loop) -> None:
    """From a step on each label is that of the neighbour."""
    loop.batch = lambda loop, step, x, y: (x, y.roll(1, -1) if step >= loop.at else y)


def momentum_nan(loop: Loop) -> None:
    """One entry of the momentum of one matrix is NaN, once."""

    def update(loop: Loop, step: int) -> None:
        if step == loop.at:
            weight = loop.matrices(loop.block)[-1]
            (state,) = [each.state[weight] for each in loop.optimizers if weight in each.state]
            name = next(name for name in ("exp_avg", "momentum", "momentum_buffer") if name in state)
            state[name].view(-1)[0] = math.nan

    loop.update = update


def schedule_jump(loop: Loop) -> None:
    """The rate has decayed to a hundredth, and then the schedule starts anew."""

    def rate(step: int) -> float:
        return 0.01 ** (step / loop.at) if step < loop.at else 1.0

    loop.rate = rate


def head_weights(loop: Loop) -> None:
    """The weights of the head become 30 times as large."""
    names = dict(loop.model.named_parameters())
    head = next(weight for name, weight in names.items() if name in ("head.weight", "embed_out.weight"))
    _once(loop, lambda loop: head.mul_(30))


def norm_gain_zero(loop: Loop) -> None:
    """The gains of one norm of one block become zero."""
    gain = next(weight for name, weight in loop.blocks[loop.block].named_parameters() if "norm" in name)
    _once(loop, lambda loop: gain.zero_())


def padding(loop: Loop) -> None:
    """From a step on half of each row is padding, which counts in the loss."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step >= loop.at:
            x, y = x.clone(), y.clone()
            x[:, LENGTH // 2 :], y[:, LENGTH // 2 - 1 :] = 0, 0
        return x, y

    loop.batch = batch


def group_rate(loop: Loop, factor: float = 30) -> None:
    """From a step on the group of one block's weights has a learning rate 30 times as large."""
    own = _own_groups(loop, list(loop.blocks[loop.block].parameters()))

    def update(loop: Loop, step: int) -> None:
        for group in own if step >= loop.at else []:
            group["lr"] *= factor

    loop.update = update


def _own_groups(loop: Loop, weights: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Weights get a group of their own in each optimizer that has some of them."""
    inside = {id(weight) for weight in weights}
    own = list[dict[str, Any]]()
    for each in loop.optimizers:
        for group in list(each.param_groups):
            taken = [weight for weight in group["params"] if id(weight) in inside]
            group["params"] = [weight for weight in group["params"] if id(weight) not in inside]
            if taken:
                each.add_param_group({**group, "params": taken})
                own.append(each.param_groups[-1])
    loop.peaks = [[group["lr"] for group in each.param_groups] for each in loop.optimizers]
    return own


def stale_gradients(loop: Loop) -> None:
    """From a step on gradients are no longer set to zero after an update."""

    def gradients(loop: Loop, step: int) -> None:
        kept = loop.kept.setdefault("gradients", {})
        for name, weight in loop.model.named_parameters() if step >= loop.at else ():
            weight.grad.add_(kept.get(name, 0.0))
            kept[name] = weight.grad.clone()

    loop.gradients = gradients


def gradient_factor(loop: Loop) -> None:
    """From a step on gradients of eight micro-batches are summed, and not averaged."""
    loop.gradients = _of_weights(lambda weight: weight.grad.mul_(8))


def head_reset(loop: Loop) -> None:
    """The weights of the head are drawn anew, as those that a checkpoint lacks."""
    names = dict(loop.model.named_parameters())
    heads = ("head.weight", "embed_out.weight", "lm_head.weight")
    _once(loop, lambda loop: next(names[name] for name in heads if name in names).normal_(std=0.1))


def mask_removed(loop: Loop) -> None:
    """From a step on tokens attend to those after them, too."""

    def act(loop: Loop) -> None:
        for part in loop.model.modules():
            if isinstance(part, Attention):
                part.is_causal = False

    _once(loop, act)


def attention_scale(loop: Loop) -> None:
    """From a step on attention logits of one block are 16 times as large."""
    attention = next(part for part in loop.blocks[loop.block].modules() if isinstance(part, Attention))
    _once(loop, lambda loop: setattr(attention, "scale", 16 * (WIDTH / HEADS) ** -0.5))


def skip_lost(loop: Loop) -> None:
    """From a step on one block returns what it adds, without what entered it."""
    _returned(loop, loop.blocks[loop.block], lambda entering, output: output - entering)


def block_zeroed(loop: Loop) -> None:
    """All weights of one block become zero."""

    def act(loop: Loop) -> None:
        for weight in loop.blocks[loop.block].parameters():
            weight.zero_()

    _once(loop, act)


def tokenizer_changed(loop: Loop) -> None:
    """From a step on tokens have other numbers."""
    loop.batch = lambda loop, step, x, y: (
        ((7 * x + 3) % VOCABULARY, (7 * y + 3) % VOCABULARY) if step >= loop.at else (x, y)
    )


def loss_factor(loop: Loop) -> None:
    """The gradients of one batch are 1,000 times too large, and are not clipped."""
    loop.clip = 0.0
    loop.gradients = _of_weights(lambda weight: weight.grad.mul_(1000), once=True)


def beta2_zero(loop: Loop) -> None:
    """From a step on Adam's second moment forgets all but the last gradient."""

    def update(loop: Loop, step: int) -> None:
        for each in loop.optimizers if step >= loop.at else ():
            for group in each.param_groups:
                group["betas"] = (group["betas"][0], 0.0)

    loop.update = update


def weight_noise(loop: Loop) -> None:
    """Noise as large as they are is added to the weights of one block."""

    def act(loop: Loop) -> None:
        for weight in loop.matrices(loop.block):
            weight.add_(torch.randn_like(weight) * weight.square().mean().sqrt())

    _once(loop, act)


def tight_clip(loop: Loop) -> None:
    """From a step on gradients are clipped to a norm of 0.0001."""

    def gradients(loop: Loop, step: int) -> None:
        if step >= loop.at:
            loop.clip = 1e-4

    loop.gradients = gradients


def transposed(loop: Loop) -> None:
    """The square matrices of one block are transposed, as by a converter of checkpoints."""

    def act(loop: Loop) -> None:
        for weight in loop.matrices(loop.block):
            if weight.shape[0] == weight.shape[1]:
                weight.copy_(weight.T.clone())

    _once(loop, act)


def gradient_noise(loop: Loop) -> None:
    """From a step on noise is added to gradients, ten times as large as they are."""
    loop.gradients = _of_weights(
        lambda weight: weight.grad.add_(10 * torch.randn_like(weight) * weight.grad.square().mean().sqrt())
    )


def long_momentum(loop: Loop) -> None:
    """From a step on momentum is 0.999."""

    def update(loop: Loop, step: int) -> None:
        for each in loop.optimizers if step >= loop.at else ():
            for group in each.param_groups:
                if "betas" in group:
                    group["betas"] = (0.999, group["betas"][1])
                else:
                    group["momentum"] = 0.999

    loop.update = update


def one_token(loop: Loop) -> None:
    """From a step on all tokens are the same one."""
    loop.batch = lambda loop, step, x, y: (torch.zeros_like(x), torch.zeros_like(y)) if step >= loop.at else (x, y)


def labels_nan(loop: Loop) -> None:
    """A mask is multiplied with a loss that is NaN where it masks, once, so all gradients are NaN."""
    loop.gradients = _of_weights(lambda weight: weight.grad.fill_(math.nan), once=True)


def norm_gain(loop: Loop) -> None:
    """The gains of one norm of one block become 20 times as large."""
    gain = next(weight for name, weight in loop.blocks[loop.block].named_parameters() if "norm" in name)
    _once(loop, lambda loop: gain.mul_(20))


def rate_zero(loop: Loop) -> None:
    """From a step on the learning rate is zero."""
    loop.rate = lambda step: min(1.0, (step + 1) / 20) * (step < loop.at)


def heavy_decay(loop: Loop) -> None:
    """From a step on weights decay by five per cent in each step."""
    loop.update = _of_weights(lambda weight: weight.mul_(0.95))


def one_label(loop: Loop) -> None:
    """From a step on all labels are the same one."""
    loop.batch = lambda loop, step, x, y: (x, torch.zeros_like(y) if step >= loop.at else y)


def inputs_scaled(loop: Loop) -> None:
    """From a step on pictures are 16 times as bright, since they are not normalized."""
    loop.batch = lambda loop, step, x, y: (16 * x if step >= loop.at else x, y)


def shuffled_tokens(loop: Loop) -> None:
    """From a step on the tokens of each row come in a random order."""

    _rows_changed(loop, lambda row: row.gather(1, torch.rand(row.shape).argsort(1)))


def cut_rows(loop: Loop) -> None:
    """From a step on rows are cut to their first four tokens."""
    loop.batch = lambda loop, step, x, y: (x[:, :4], y[:, :4]) if step >= loop.at else (x, y)


def labels_leak(loop: Loop) -> None:
    """From a step on each label is the token itself, and not the next one."""
    loop.batch = lambda loop, step, x, y: (x, x if step >= loop.at else y)


def sorted_classes(loop: Loop) -> None:
    """From a step on pictures come sorted by their class, 20 batches of each."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step >= loop.at:
            label = torch.full_like(y, step // 20 % CLASSES)
            x, y = x - loop.data.patterns[y] + loop.data.patterns[label], label
        return x, y

    loop.batch = batch


def negative_pictures(loop: Loop) -> None:
    """From a step on pictures are negatives, dark where they were bright."""
    loop.batch = lambda loop, step, x, y: (-x if step >= loop.at else x, y)


def equal_rows(loop: Loop) -> None:
    """From a step on all rows of a batch are its first one."""
    loop.batch = lambda loop, step, x, y: (x[[0] * len(x)], y[[0] * len(y)]) if step >= loop.at else (x, y)


def warm_up_again(loop: Loop) -> None:
    """After a resume the rate warms up once more, over 20 steps."""
    loop.rate = lambda step: min(1.0, (step + 1 - (loop.at if step >= loop.at else 0)) / 20)


def schedule_by_micro_batch(loop: Loop) -> None:
    """The rate decays slowly, and from a step on 16 times as fast, as if each of 16 micro-batches were a step."""
    loop.rate = lambda step: min(1.0, (step + 1) / 20) * 0.995 ** (step + 15 * max(0, step - loop.at))


def few_bits(loop: Loop) -> None:
    """The matrices of one block are rounded to seven values each."""

    def act(loop: Loop) -> None:
        for weight in _tensors(loop):
            _round(weight)

    _once(loop, act)


def _round(weight: Tensor) -> None:
    unit = weight.abs().max() / 3
    weight.copy_((weight / unit).round() * unit)


def _tensors(loop: Loop) -> list[nn.Parameter]:
    """The matrices and kernels of the block."""
    return [weight for weight in loop.blocks[loop.block].parameters() if weight.ndim > 1]


def shard_missing(loop: Loop) -> None:
    """The first half of each matrix of one block is zero, as of a shard that was not loaded."""

    def act(loop: Loop) -> None:
        for weight in _tensors(loop):
            weight[: len(weight) // 2] = 0.0

    _once(loop, act)


def old_block(loop: Loop) -> None:
    """One block gets its initial weights again, as from the file of an older checkpoint."""
    first = [weight.detach().clone() for weight in loop.blocks[loop.block].parameters()]

    def act(loop: Loop) -> None:
        for weight, value in zip(loop.blocks[loop.block].parameters(), first, strict=True):
            weight.copy_(value)

    _once(loop, act)


def average_copied(loop: Loop) -> None:
    """The exponential average of the weights, over 100 steps, is written into the model."""
    average = [weight.detach().clone() for weight in loop.model.parameters()]

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            for weight, value in zip(loop.model.parameters(), average, strict=True):
                value.lerp_(weight, 0.01)
                if step == loop.at:
                    weight.copy_(value)
        return x, y

    loop.batch = batch


def positions_reset(loop: Loop) -> None:
    """The embedding of positions is drawn anew with a standard deviation of one, PyTorch's default."""
    positions = loop.model.positions
    _once(loop, lambda loop: getattr(positions, "weight", positions).normal_())


def embedding_row_nan(loop: Loop) -> None:
    """The embedding of one token becomes NaN."""
    embedding = next(weight for weight in loop.model.parameters() if weight.ndim == 2)
    _once(loop, lambda loop: embedding[5].fill_(math.nan))


def order_of_qkv(loop: Loop) -> None:
    """Fused queries, keys and values are sorted by head and no longer by kind, or the reverse, by a converter."""

    def act(loop: Loop) -> None:
        sorted_by = (HEADS, 3) if loop.model_name == "transformers" else (3, HEADS)
        for weight in loop.model.parameters():
            if weight.shape == (3 * WIDTH, WIDTH):
                weight.copy_(weight.unflatten(0, (*sorted_by, -1)).transpose(0, 1).flatten(0, 2))

    _once(loop, act)


def mixer_detached(loop: Loop) -> None:
    """From a step on no gradients pass through the attention of one block, or what it has instead."""
    _returned(loop, _mixer(loop), lambda entering, output: output.detach())


def _mixer(loop: Loop) -> nn.Module:
    mixers = ("attention", "self_attn", "mixer", "convolution")
    return next(part for name, part in loop.blocks[loop.block].named_children() if name in mixers)


def lone_rank(loop: Loop) -> None:
    """From a step on gradients are those of an eighth of the batch, as of one rank without an all-reduce."""

    def of_one(grad: Tensor) -> Tensor:
        own = torch.zeros_like(grad)
        own[: len(grad) // 8] = 8 * grad[: len(grad) // 8]
        return own

    def change(entering: Tensor, output: Tensor) -> Tensor:
        output.register_hook(of_one)
        return output

    _returned(loop, _head(loop), change)


def _head(loop: Loop) -> nn.Module:
    return next(part for name, part in loop.model.named_children() if name in ("head", "embed_out", "lm_head"))


def _embedding(loop: Loop) -> nn.Embedding:
    return next(part for part in loop.model.modules() if isinstance(part, nn.Embedding))


def _adapters(module: nn.Module) -> list[Adapter]:
    return [part for part in module.modules() if isinstance(part, Adapter)]


def embedding_summed(loop: Loop) -> None:
    """From a step on gradients of the embedding are summed over eight ranks, and not averaged."""
    embedding = next(weight for weight in loop.model.parameters() if weight.ndim == 2)

    def gradients(loop: Loop, step: int) -> None:
        if step >= loop.at:
            embedding.grad.mul_(8)

    loop.gradients = gradients


def states_of_others(loop: Loop) -> None:
    """The moments of each weight become those of the next one of its shape, as after a resume in another order."""

    def act(loop: Loop) -> None:
        for each in loop.optimizers:
            of_shape = dict[torch.Size, list[Tensor]]()
            for weight in each.state:
                of_shape.setdefault(weight.shape, []).append(weight)
            for weights in of_shape.values():
                states = [each.state[weight] for weight in weights]
                for weight, state in zip(weights, [*states[1:], states[0]], strict=True):
                    each.state[weight] = state

    _once(loop, act)


def steps_forgotten(loop: Loop) -> None:
    """Adam forgets the number of its steps, and not its moments, so it corrects a bias that they no longer have."""

    def act(loop: Loop) -> None:
        for state in loop.optimizers[0].state.values():
            state["step"].zero_()
            if "mu_product" in state:
                state["mu_product"].fill_(1.0)

    _once(loop, act)


def second_moment_rounded(loop: Loop) -> None:
    """From a step on second moments are kept in 8 bits without blocks of their own, so that small ones become zero."""

    def update(loop: Loop, step: int) -> None:
        for state in loop.optimizers[0].state.values() if step >= loop.at else ():
            moment = state["exp_avg_sq"] if "exp_avg_sq" in state else state["square_avg"]
            unit = (moment.max() / 255).clamp(min=1e-30)
            moment.copy_((moment / unit).round() * unit)

    loop.update = update


def left_out(loop: Loop) -> None:
    """From a step on the optimizer has no weights of one block, and their gradients are not set to zero either."""
    inside = {id(weight) for weight in loop.blocks[loop.block].parameters()}

    def act(loop: Loop) -> None:
        for each in loop.optimizers:
            for group in each.param_groups:
                group["params"] = [weight for weight in group["params"] if id(weight) not in inside]

    _once(loop, act)


def head_replaced(loop: Loop) -> None:
    """The head gets a new tensor with the same weights, which the optimizer does not know."""

    def act(loop: Loop) -> None:
        _head(loop).weight = nn.Parameter(_head(loop).weight.detach().clone())

    _once(loop, act)


def own_documents(loop: Loop) -> None:
    """From a step on a mask takes each token for a document of its own, so tokens attend to themselves alone."""

    def act(loop: Loop) -> None:
        for part in loop.model.modules():
            if isinstance(part, Attention):
                part.is_causal, part.mask = False, torch.eye(LENGTH, dtype=torch.bool)

    _once(loop, act)


def norm_epsilon(loop: Loop) -> None:
    """From a step on the epsilon of all norms is one."""

    def act(loop: Loop) -> None:
        for part in loop.model.modules():
            for name in {"eps", "variance_epsilon"} & set(vars(part)):
                setattr(part, name, 1.0)

    _once(loop, act)


def no_activation(loop: Loop) -> None:
    """From a step on one block has no activation function."""
    names = ("GELU", "SiLU")
    activation = next(part for part in loop.blocks[loop.block].modules() if type(part).__name__.startswith(names))
    _returned(loop, activation, lambda entering, output: entering)


def block_skipped(loop: Loop) -> None:
    """From a step on one block is skipped."""
    _returned(loop, loop.blocks[loop.block], lambda entering, output: entering)


def stays_in_evaluation(loop: Loop) -> None:
    """From a step on the model is in the mode of evaluation, so its norms use averages that no longer move."""
    _once(loop, lambda loop: loop.model.eval())


def state_kept(loop: Loop) -> None:
    """The states of one block no longer decay."""
    _once(loop, lambda loop: loop.blocks[loop.block].mixer.decay.fill_(10.0))


def block_overflow(loop: Loop) -> None:
    """From a step on what one block returns overflows in fp16."""
    _returned(loop, loop.blocks[loop.block], lambda entering, output: (1e6 * output).half().float() / 1e6)


def gradients_e4m3(loop: Loop) -> None:
    """From a step on gradients of one block pass through E4M3 without a scale, where most of them are zero."""

    def gradients(loop: Loop, step: int) -> None:
        for weight in loop.blocks[loop.block].parameters() if step >= loop.at else ():
            weight.grad.copy_(weight.grad.to(torch.float8_e4m3fn))

    loop.gradients = gradients


def temperature(loop: Loop) -> None:
    """From a step on logits are divided by a temperature of a tenth."""
    _returned(loop, _head(loop), lambda entering, output: output / 0.1)


def tokens_added(loop: Loop) -> None:
    """The rows of the head of two tokens are drawn anew with a standard deviation of one."""
    _once(loop, lambda loop: _head(loop).weight[-2:].normal_())


def expert_lost(loop: Loop) -> None:
    """All weights of one expert of one block become zero."""

    def act(loop: Loop) -> None:
        for weight in loop.blocks[loop.block].mlp.experts[0].parameters():
            weight.zero_()

    _once(loop, act)


def reward_sign(loop: Loop) -> None:
    """From a step on rewards have the wrong sign."""
    loop.rewards = lambda loop, step, reward: -reward if step >= loop.at else reward


def stale_sampler(loop: Loop) -> None:
    """From a step on samples come from a policy that is no longer renewed."""
    _once(loop, lambda loop: setattr(loop, "RENEWED", loop.steps))


def adapter_weights(loop: Loop) -> None:
    """The adapters of one block become 30 times as large."""

    def act(loop: Loop) -> None:
        for name, weight in loop.blocks[loop.block].named_parameters():
            if ".up." in name:
                weight.mul_(30)

    _once(loop, act)


# The addresses below are of reports by those who met such a fault.


def rows_ignored(loop: Loop) -> None:
    """From a step on labels of all rows but one are ignored, as where the beginning of an answer is not found."""
    # https://github.com/huggingface/trl/issues/1920
    loop.batch = lambda loop, step, x, y: (
        x,
        y.index_fill(0, torch.arange(1, len(y)), IGNORED) if step >= loop.at else y,
    )


def no_labels(loop: Loop) -> None:
    """All labels of one batch are ignored, so its loss is NaN and its gradients are zero."""
    # https://github.com/huggingface/trl/issues/1053
    loop.batch = lambda loop, step, x, y: (x, torch.full_like(y, IGNORED) if step == loop.at else y)


def unmasked_labels(loop: Loop) -> None:
    """From a step on labels of all tokens count, and not those of masked ones alone."""
    # https://github.com/huggingface/transformers/issues/2759
    loop.batch = lambda loop, step, x, y: (x, torch.where(y == IGNORED, x, y) if step >= loop.at else y)


def corrupt_shard(loop: Loop) -> None:
    """For 40 steps half of the rows come from a shard of random bytes, as a truncated or compressed one is."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if loop.at <= step < loop.at + 40:
            is_bad = (torch.arange(len(x)) % 2 == 0)[:, None]
            x = torch.where(is_bad, torch.randint_like(x, VOCABULARY), x)
            y = torch.where(is_bad & (y != IGNORED), torch.randint_like(y, VOCABULARY), y)
        return x, y

    loop.batch = batch


def rate_negative(loop: Loop) -> None:
    """The rate falls linearly, and from a step on each step counts as three in it, so that it is below zero."""
    # A schedule is made anew on resuming, and does not end: https://github.com/Nerogar/OneTrainer/issues/1604
    loop.rate = lambda step: min(1.0, (step + 1) / 20) * (1 - step * (3 if step >= loop.at else 1) / loop.steps)


def group_stopped(loop: Loop) -> None:
    """From a step on the group of one block's weights has a learning rate of zero."""
    # Groups that a resumed scheduler does not know, or rates by layer with the wrong exponent.
    group_rate(loop, 0.0)


def norms_decayed(loop: Loop) -> None:
    """From a step on gains of norms, and biases, decay by 50 times the learning rate."""
    # https://github.com/huggingface/transformers/pull/35927 (norms that are taken for matrices)
    own = _own_groups(loop, [weight for weight in loop.model.parameters() if weight.ndim < 2])

    def update(loop: Loop, step: int) -> None:
        for group in own if step >= loop.at else []:
            group["weight_decay"] = 50.0

    loop.update = update


def optimizer_lost(loop: Loop) -> None:
    """The optimizer loses its state, as after a resume from the weights alone."""
    # https://github.com/EvolvingLMMs-Lab/OneVision-Encoder/pull/65
    _once(loop, lambda loop: [each.state.clear() for each in loop.optimizers])


def maximize(loop: Loop) -> None:
    """From a step on the optimizer climbs, by a flag that came with the settings of another run."""
    # load_state_dict of torch.optim overwrites all settings of groups.

    def update(loop: Loop, step: int) -> None:
        for group in loop.optimizers[0].param_groups if step >= loop.at else []:
            group["maximize"] = True

    loop.update = update


def log_zero(loop: Loop) -> None:
    """From a step on the loss has an entropy in which one token is masked, so that zero times log zero is NaN."""
    # https://github.com/huggingface/trl/pull/7263

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        probability = logits.index_fill(-1, torch.tensor([0]), -math.inf).softmax(-1)
        entropy = -(probability * probability.log()).sum(-1).mean()
        return loss - 0.01 * entropy if loop.now >= loop.at else loss

    loop.objective = objective


def padded_row(loop: Loop) -> None:
    """From a step on one row is padding alone for one block's window, so that its softmax over no keys is NaN."""
    # https://github.com/pytorch/pytorch/issues/103749
    _returned(loop, _mixer(loop), lambda entering, output: output.index_fill(0, torch.tensor([0]), math.nan))


def norm_overflow(loop: Loop) -> None:
    """From a step on squares in one norm of one block overflow in fp16, so that it returns zeros."""
    # https://github.com/pytorch/pytorch/pull/133085
    norm = next(part for name, part in loop.blocks[loop.block].named_modules() if name.endswith("norm"))

    def change(entering: Tensor, output: Tensor) -> Tensor:
        x = (3000 * entering).half()
        return (x * x.square().mean(-1, keepdim=True).rsqrt()).float() * norm.weight

    _returned(loop, norm, change)


def saturated(loop: Loop) -> None:
    """From a step on what one block returns is cut at a tenth of its largest value, by a scale that is out of date."""
    # https://github.com/Dao-AILab/flash-attention/pull/2694 (FP8 with a stale maximum)

    def change(entering: Tensor, output: Tensor) -> Tensor:
        largest = 0.1 * output.detach().abs().max()
        return output.clamp(-largest, largest)

    _returned(loop, loop.blocks[loop.block], change)


def bit_flip(loop: Loop) -> None:
    """The highest bit of the exponent of one weight is turned over."""
    # Silent data corruptions at scale (Dixit et al. 2021, arXiv:2102.11245)
    _once(loop, lambda loop: loop.matrices(loop.block)[-1].view(torch.int32)[0, :1].bitwise_xor_(1 << 30))


def one_head(loop: Loop) -> None:
    """The queries of one head of one block grow by 30 per cent in each of 12 steps."""
    # Heads whose logits run away (Dehghani et al. 2023, arXiv:2302.05442)
    names = ("query", "q_proj", "qkv", "query_key_value")
    weights = loop.blocks[loop.block].named_parameters()
    query = next(weight for name, weight in weights if name.split(".")[-2] in names and weight.ndim == 2)

    @torch.no_grad()
    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if loop.at <= step < loop.at + 12:
            query[: WIDTH // HEADS].mul_(1.3)
        return x, y

    loop.batch = batch


def query_norm_lost(loop: Loop) -> None:
    """From a step on another kernel computes attention, which does not normalize queries and keys."""
    # https://github.com/huggingface/transformers/issues/32309 (a kernel without the cap of a model)
    for block in loop.blocks:
        for norm in (block.attention.query_norm, block.attention.key_norm):
            _returned(loop, norm, lambda entering, output: entering)


def encoder_causal(loop: Loop) -> None:
    """From a step on an encoder attends to earlier positions alone, by the default of a kernel."""
    # https://github.com/huggingface/transformers/issues/48172

    def act(loop: Loop) -> None:
        for part in loop.model.modules():
            if hasattr(part, "is_causal"):
                part.is_causal = True

    _once(loop, act)


def embedding_scaled(loop: Loop) -> None:
    """From a step on embeddings are multiplied by the root of the width, which they contain already."""
    # https://github.com/RLinf/RLinf/pull/1098
    embedding = _embedding(loop)
    _returned(loop, embedding, lambda entering, output: output * WIDTH**0.5)


def final_norm_skipped(loop: Loop) -> None:
    """From a step on the head gets what the last block returns, without the norm between them."""
    # A fused loss that takes hidden states from the list of the blocks' outputs, which are not normalized.
    named = loop.model.named_modules()
    norms = [part for name, part in named if name.split(".")[-1] in ("norm", "final_layer_norm")]
    _returned(loop, norms[-1], lambda entering, output: entering)


def dropout_lost(loop: Loop) -> None:
    """From a step on nothing is dropped, since an evaluation left the model in its mode."""
    # https://github.com/huggingface/lerobot/issues/3668
    stays_in_evaluation(loop)


def blocks_rotated(loop: Loop) -> None:
    """Each block gets the weights of the one before it, as from a checkpoint whose layers are sorted wrongly."""
    # https://github.com/ollama/ollama/pull/12015
    _once(loop, lambda loop: _rotate(loop.blocks))


def experts_reordered(loop: Loop) -> None:
    """The experts of one block get each other's weights, but its router stays, as after a change of ranks."""
    _once(loop, lambda loop: _rotate(list(loop.blocks[loop.block].mlp.experts)))


def _rotate(parts: list[nn.Module]) -> None:
    states = [copy.deepcopy(part.state_dict()) for part in parts]
    for part, state in zip(parts, [states[-1], *states], strict=False):
        part.load_state_dict(state)


def adapters_merged(loop: Loop) -> None:
    """Adapters are merged into their matrices for sampling, and not taken out again, so that they act twice."""
    # https://github.com/huggingface/trl/pull/2818 merges them for this purpose.

    def act(loop: Loop) -> None:
        for part in _adapters(loop.model):
            part.base.weight.add_(2 * part.up.weight @ part.down.weight)

    _once(loop, act)


def tied_gradient_lost(loop: Loop) -> None:
    """From a step on the matrix of embedding and head gets no gradient from the head, as of another pipeline stage."""
    # https://github.com/NVIDIA/Megatron-LM/issues/299
    head = loop.model.head
    _returned(loop, head, lambda entering, output: F.linear(entering, head.weight.detach()))


def accumulation_not_divided(loop: Loop) -> None:
    """From a step on the batch comes in four micro-batches, and their losses are summed."""
    # https://github.com/huggingface/transformers/issues/37766
    loop.pieces = lambda step: 4 if step >= loop.at else 1
    loop.objective = lambda loop, loss, logits: loss * loop.pieces(loop.now)


def blocks_without_gradients(loop: Loop) -> None:
    """From a step on the embedding is frozen and blocks are checkpointed the old way, so that they get no gradients."""
    # https://github.com/huggingface/transformers/issues/26221

    def act(loop: Loop) -> None:
        for name, part in loop.model.named_children():
            if name in ("embedding", "positions"):
                part.requires_grad_(False)
        _checkpoint(loop, use_reentrant=True)

    _once(loop, act)


def _checkpoint(loop: Loop, *, use_reentrant: bool) -> None:
    for block in loop.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=use_reentrant)


def sampler_quantized(loop: Loop) -> None:
    """From a step on samples and their probabilities come from an engine that rounds matrices to seven values."""
    # https://github.com/verl-project/verl/issues/1803

    @torch.no_grad()
    def sharpness(loop: Loop, step: int) -> float:
        for weight in loop.kept["sampler"].parameters() if step >= loop.at else ():
            if weight.ndim == 2:
                _round(weight)
        return 1.0

    loop.sharpness = sharpness


def reference_synced(loop: Loop) -> None:
    """From a step on the reference is renewed with the policy, so that they are never apart."""
    # https://github.com/aburkov/theLMbook/issues/8

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step >= loop.at:
            loop.kept["reference"] = copy.deepcopy(loop.model)
        return x, y

    loop.batch = batch


def reward_nan(loop: Loop) -> None:
    """The reward of one sample is NaN, once, and so are all gradients; the loop leaves out that update."""
    # https://github.com/modelscope/ms-swift/issues/8123
    loop.rewards = lambda loop, step, reward: (
        reward.index_fill(0, torch.tensor([0]), math.nan) if step == loop.at else reward
    )

    def gradients(loop: Loop, step: int) -> None:
        for weight in loop.parameters():
            if not weight.grad.isfinite().all():
                weight.grad = None

    loop.gradients = gradients


def one_expert(loop: Loop) -> None:
    """From a step on each token goes to one expert in place of two, as by the configuration of another model."""

    def act(loop: Loop) -> None:
        for part in loop.model.modules():
            if isinstance(part, Experts):
                part.top_k = 1

    _once(loop, act)


def wrong_dtype(loop: Loop) -> None:
    """From a step on tokens of 32 bits are read as such of 16, so that every second one is zero."""
    # https://github.com/mosaicml/llm-foundry/issues/321 (the type of a file is assumed, and not stored)

    _rows_changed(loop, lambda row: torch.stack([row, torch.zeros_like(row)], 2).flatten(1)[:, : row.shape[1]])


def unknown_tokens(loop: Loop) -> None:
    """From a step on half of the letters are not in the vocabulary, and become one unknown letter."""
    # https://github.com/facebookresearch/fairseq/issues/2299

    def known(tokens: Tensor) -> Tensor:
        return torch.where(tokens < VOCABULARY // 2, tokens, VOCABULARY - 1)

    loop.batch = lambda loop, step, x, y: (known(x), known(y)) if step >= loop.at else (x, y)


def wrong_mask(loop: Loop) -> None:
    """From a step on letters are masked by the number of padding, whose embedding is not trained."""
    # https://github.com/huggingface/transformers/issues/16798
    loop.batch = lambda loop, step, x, y: (torch.where(x == VOCABULARY, x + 1, x) if step >= loop.at else x, y)


def nan_pixels(loop: Loop) -> None:
    """From a step on one picture is black, and its range, by which it is divided, is zero, so that it is NaN."""
    # https://github.com/albumentations-team/albumentations/issues/1742
    loop.batch = lambda loop, step, x, y: (
        x.index_fill(0, torch.tensor([0]), math.nan) if step >= loop.at else x,
        y,
    )


def mixed_pictures(loop: Loop) -> None:
    """From a step on pictures are mixed in pairs (mixup), and their labels in other pairs."""
    # https://github.com/xudonmao/VMT/issues/1

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step >= loop.at:
            x = (x + x[torch.randperm(len(x))]) / 2
            y = torch.where(torch.rand(len(y)) < 0.5, y, y[torch.randperm(len(y))])
        return x, y

    loop.batch = batch


def softmax_twice(loop: Loop) -> None:
    """From a step on the head returns probabilities, of which the loss takes a softmax again."""
    # https://github.com/bowang-lab/Transformer-GCN-QA/pull/32
    _returned(loop, _head(loop), lambda entering, output: output.softmax(-1))


def divided_twice(loop: Loop) -> None:
    """From a step on the batch comes in four micro-batches, and their losses are divided by four twice."""
    # https://github.com/huggingface/accelerate/issues/3533
    loop.pieces = lambda step: 4 if step >= loop.at else 1
    loop.objective = lambda loop, loss, logits: loss / loop.pieces(loop.now)


def schedule_exhausted(loop: Loop) -> None:
    """The rate falls linearly to zero long before training ends, since each of several ranks makes its steps."""
    # https://github.com/Lightricks/LTX-Video-Trainer/issues/67
    loop.rate = lambda step: min(1.0, (step + 1) / 20) * max(0.0, 1 - step / loop.at)


def one_rate(loop: Loop) -> None:
    """From a step on the rate of AdamW is that of Muon, too, since a scheduler writes one rate into all groups."""
    # https://github.com/deepspeedai/DeepSpeed/issues/7713

    def update(loop: Loop, step: int) -> None:
        muon, adamw = loop.optimizers
        for group in muon.param_groups if step >= loop.at else []:
            group["lr"] = adamw.param_groups[0]["lr"]

    loop.update = update


def stepped_twice(loop: Loop) -> None:
    """From a step on the optimizer makes two steps with the gradients of each batch."""
    # https://github.com/NVIDIA/physicsnemo/issues/1911

    def update(loop: Loop, step: int) -> None:
        for each in loop.optimizers if step >= loop.at else []:
            each.step()

    loop.update = update


def never_stepped(loop: Loop) -> None:
    """From a step on gradients are accumulated for more batches than come, so that the optimizer makes no step."""
    # https://github.com/huggingface/transformers/issues/2995

    def act(loop: Loop) -> None:
        loop.clip = 0.0
        for each in loop.optimizers:
            each.step = each.zero_grad = lambda: None

    _once(loop, act)


def rounded_away(loop: Loop) -> None:
    """From a step on weights are kept in E4M3 without masters, and most updates are less than a half of its steps."""
    # https://github.com/pytorch/ao/pull/1124 (bf16, and smaller rates)

    @torch.no_grad()
    def round_weights(*_: Any) -> None:
        for weight in loop.model.parameters() if loop.now >= loop.at else ():
            weight.copy_(weight.to(torch.float8_e4m3fn))

    for each in loop.optimizers:
        each.register_step_post_hook(round_weights)


def scales_ignored(loop: Loop) -> None:
    """One matrix of each block comes from FP8 without its scales, so that each row has 448 as its largest value."""
    # https://github.com/unslothai/unsloth/issues/6200

    def act(loop: Loop) -> None:
        for block in range(BLOCKS):
            weight = loop.matrices(block)[-2]
            weight.mul_(448 / weight.abs().amax(1, keepdim=True))

    _once(loop, act)


def weights_reverted(loop: Loop) -> None:
    """All weights become what they were at first, since the optimizer has kept those and writes them back."""
    # https://github.com/NVIDIA/Megatron-LM/issues/174
    first = copy.deepcopy(loop.model.state_dict())
    _once(loop, lambda loop: loop.model.load_state_dict(first))


def adapters_zero(loop: Loop) -> None:
    """Both matrices of all adapters are zero at first, so that neither has a gradient."""
    # https://github.com/nvidia-cosmos/cosmos-predict2.5/pull/15
    for part in _adapters(loop.model):
        nn.init.zeros_(part.down.weight)


def adapters_lost(loop: Loop) -> None:
    """Adapters are made anew on resuming, in place of those that were loaded."""
    # https://github.com/huggingface/lerobot/issues/3459

    def act(loop: Loop) -> None:
        for part in _adapters(loop.model):
            part.down.reset_parameters()
            part.up.weight.zero_()

    _once(loop, act)


def scaled_twice(loop: Loop) -> None:
    """From a step on attention logits are divided by the root of the width of a head twice, by model and kernel."""
    # https://github.com/huggingface/transformers/pull/38290

    def act(loop: Loop) -> None:
        for part in loop.model.modules():
            if hasattr(part, "scaling"):
                part.scaling = HEADS / WIDTH
            elif isinstance(part, Attention):
                part.scale = HEADS / WIDTH

    _once(loop, act)


def residual_doubled(loop: Loop) -> None:
    """From a step on what enters a block is added to what it returns, which contains it already, in all blocks."""
    # https://github.com/yunzeliu/MAP/issues/3
    for block in loop.blocks:
        _returned(loop, block, lambda entering, output: output + entering)


def cap_multiplied(loop: Loop) -> None:
    """From a step on logits, which are to be capped at 30, are multiplied by the tangent instead of the cap."""
    # https://github.com/unslothai/unsloth-zoo/pull/593
    _returned(loop, _head(loop), lambda entering, output: output * (output / 30).tanh())


def biases_summed(loop: Loop) -> None:
    """From a step on the last bias of each block is added by each of eight ranks, whose outputs are summed."""
    # https://github.com/huggingface/text-generation-inference/issues/1036
    for block in loop.blocks:
        last = [part for part in block.modules() if isinstance(part, nn.Linear) and part.bias is not None][-1]
        _returned(loop, last, lambda entering, output, last=last: output + 7 * last.bias)


def balancing_unscaled(loop: Loop) -> None:
    """From a step on the loss that balances experts is not multiplied by its coefficient, a hundredth."""
    # https://github.com/NVIDIA-NeMo/Automodel/issues/1408

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        balancing = sum(block.mlp.balancing for block in loop.blocks)
        return loss + 0.99 * balancing if loop.now >= loop.at else loss

    loop.objective = objective


def expert_gradients_summed(loop: Loop) -> None:
    """From a step on gradients of experts are summed over eight ranks of expert parallelism, and not averaged."""
    # https://github.com/NVIDIA/Megatron-LM/pull/5956

    def gradients(loop: Loop, step: int) -> None:
        for block in loop.blocks if step >= loop.at else []:
            for weight in block.mlp.experts.parameters():
                weight.grad.mul_(8)

    loop.gradients = gradients


def tokens_dropped(loop: Loop) -> None:
    """From a step on the capacity of experts is full after a quarter of the batch, and they drop all other tokens."""
    # Capacities are those of the Switch Transformer (arXiv:2101.03961).

    def change(entering: Tensor, output: Tensor) -> Tensor:
        is_taken = torch.arange(len(output)) < len(output) // 4
        return torch.where(is_taken[:, None, None], output, 0.0)

    for block in loop.blocks:
        _returned(loop, block.mlp, change)


def last_micro_batch(loop: Loop) -> None:
    """From a step on gradients are set to zero before each of four micro-batches, so that the last one alone counts."""
    # https://github.com/pytorch/torchtitan/pull/3575
    loop.pieces = lambda step: 4 if step >= loop.at else 1

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        if loop.now < loop.at:
            return loss
        number = loop.kept["micro_batch"] = loop.kept.get("micro_batch", 0) + 1
        return loss if number % 4 == 0 else loss.detach() + 0 * loss

    loop.objective = objective


def clip_range_tiny(loop: Loop) -> None:
    """From a step on ratios are clipped at 0.0003, as those of whole samples (GSPO) and not of tokens are."""
    # https://github.com/huggingface/trl/issues/3834 (the other way round)
    _once(loop, lambda loop: setattr(loop, "CLIPPED", 3e-4))


def sampler_of_base(loop: Loop) -> None:
    """From a step on samples come from the first policy, since an engine that wakes up is not sent the trained one."""
    # https://github.com/huggingface/trl/issues/5312

    def sharpness(loop: Loop, step: int) -> float:
        if step >= loop.at:
            loop.kept["sampler"] = loop.kept["reference"]
        return 1.0

    loop.sharpness = sharpness


def reward_units(loop: Loop) -> None:
    """From a step on rewards are in per cent."""
    # https://github.com/huggingface/trl/pull/2777 (a reward in two ranges)
    loop.rewards = lambda loop, step, reward: reward * (100 if step >= loop.at else 1)


def next_corpus(loop: Loop) -> None:
    """From a step on all text is of another corpus, since corpora are read one after another."""
    # https://github.com/pytorch/torchtitan/issues/128
    corpus = Text(2000 + loop.seed)
    loop.batch = lambda loop, step, x, y: corpus(len(x)) if step >= loop.at else (x, y)


def smoothing_inverted(loop: Loop) -> None:
    """From a step on labels are smoothed by nine tenths, which was to be the part that they keep."""
    # https://github.com/paiml/aprender/pull/2199

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loop.smoothing = 0.9 if step >= loop.at else 0.0
        return x, y

    loop.batch = batch


def sides_swapped(loop: Loop) -> None:
    """From a step on height and width of pictures are swapped, by a reader that has them in another order."""
    # https://github.com/developmentseed/tensorflow-eo-training/issues/11
    loop.batch = lambda loop, step, x, y: (x.transpose(-1, -2) if step >= loop.at else x, y)


def classes_renumbered(loop: Loop) -> None:
    """From a step on classes have other numbers, since those of the next folder are sorted in another way."""
    # https://github.com/modestyachts/ImageNetV2/issues/4
    loop.batch = lambda loop, step, x, y: (x, (3 * y + 1) % CLASSES if step >= loop.at else y)


def all_masked(loop: Loop) -> None:
    """From a step on a mask that is inverted adds the least number to all attention logits, so that all are equal."""
    # https://github.com/lsdefine/attention-is-all-you-need-keras/issues/16

    def act(loop: Loop) -> None:
        for part in loop.model.modules():
            if isinstance(part, Attention):
                part.is_causal, part.mask = False, torch.full((1, 1), torch.finfo().min)

    _once(loop, act)


def gains_plus_one(loop: Loop) -> None:
    """One is added to the gains of all norms, by a converter of models whose gains are stored without it."""
    # https://github.com/utensils/mold/pull/1078

    def act(loop: Loop) -> None:
        for part in loop.model.modules():
            if "Norm" in type(part).__name__:
                part.weight.add_(1.0)

    _once(loop, act)


def sequential_residual(loop: Loop) -> None:
    """From a step on the MLP of each block sees what attention adds, which it did not, by another default."""
    # https://github.com/ggml-org/ggml/issues/161 (the other way round)

    def act(loop: Loop) -> None:
        for block in loop.blocks:
            block.use_parallel_residual = False

    _once(loop, act)


def residual_after_norm(loop: Loop) -> None:
    """From a step on each block adds to what its norm returns, and not to what enters it."""
    # https://github.com/SHI-Labs/Compact-Transformers/issues/25
    for block in loop.blocks:
        _returned(loop, block, lambda entering, output: output - entering + F.layer_norm(entering, (WIDTH,)))


def paths_dropped(loop: Loop) -> None:
    """From a step on each row skips each block with a chance of nine tenths, which was to be that of keeping it."""
    # https://github.com/pudae/tensorflow-densenet/pull/22
    _skip_blocks(loop, 0.9)


def tail_unwritten(loop: Loop) -> None:
    """From a step on a kernel leaves zeros for the second half of the positions in the attention of one block."""
    # https://github.com/ELS-RD/kernl/issues/73 (lengths that are no multiples of a kernel's block)

    def change(entering: Tensor, output: Tensor) -> Tensor:
        is_written = torch.arange(output.shape[1]) < output.shape[1] // 2
        return torch.where(is_written[:, None], output, 0.0)

    _returned(loop, _mixer(loop), change)


def stale_output(loop: Loop) -> None:
    """From a step on the MLP of one block returns what it did for the batch before, from a buffer of a CUDA graph."""
    # https://github.com/pytorch/pytorch/issues/104435

    def change(entering: Tensor, output: Tensor) -> Tensor:
        last = loop.kept.get("output", output.detach())
        loop.kept["output"] = output.detach()
        return last

    _returned(loop, loop.blocks[loop.block].mlp, change)


def shard_not_added(loop: Loop) -> None:
    """From a step on the second half of the letters has zeros as embeddings, as those of a rank that is not added."""
    # Embeddings that are split over ranks by the vocabulary, as Megatron-LM's, without their all-reduce.
    embedding = _embedding(loop)
    _returned(
        loop, embedding, lambda entering, output: torch.where((entering < VOCABULARY // 2)[..., None], output, 0.0)
    )


def head_tied(loop: Loop) -> None:
    """The head gets the weights of the embedding on loading, though they were not tied."""
    # https://github.com/NVIDIA-NeMo/Automodel/pull/2942
    embedding = _embedding(loop)
    _once(loop, lambda loop: _head(loop).weight.copy_(embedding.weight))


def tokens_suppressed(loop: Loop) -> None:
    """From a step on logits of two letters are -10,000, since they are taken for padding of the vocabulary."""
    # https://github.com/OpenNMT/OpenNMT-py/issues/714
    last = torch.tensor([VOCABULARY - 2, VOCABULARY - 1])
    _returned(loop, _head(loop), lambda entering, output: output.index_fill(-1, last, -1e4))


def default_initial(loop: Loop) -> None:
    """All matrices have initial values with a standard deviation of one, PyTorch's default of embeddings."""
    # https://github.com/pytorch/pytorch/issues/3121
    for weight in loop.model.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight)


def half_states(loop: Loop) -> None:
    """From a step on Adam's states are in fp16, in which squares of small gradients are zero, and so is epsilon."""
    # https://github.com/NVIDIA/apex/issues/240

    def update(loop: Loop, step: int) -> None:
        for group in loop.optimizers[0].param_groups if step >= loop.at else []:
            group["eps"] = 0.0
            for weight in group["params"]:
                square, beta2 = loop.optimizers[0].state[weight]["exp_avg_sq"], group["betas"][1]
                is_lost = torch.lerp(square, weight.grad.square(), 1 - beta2).half() == 0
                square[is_lost], weight.grad[is_lost] = 0.0, 0.0

    loop.update = update


def decay_in_gradient(loop: Loop) -> None:
    """From a step on a tenth of the weights is added to their gradients, and not taken from them (Adam for AdamW)."""
    # https://github.com/deepspeedai/DeepSpeed/pull/482 (a flag that tells one from the other)
    loop.update = _of_weights(lambda weight: weight.grad.add_(weight, alpha=0.1))


def plateau_mode(loop: Loop) -> None:
    """From a step on the rate falls to a tenth every ten steps, by a scheduler that waits for the loss to grow."""
    # https://github.com/FunctionLab/selene/issues/115
    loop.rate = lambda step: min(1.0, (step + 1) / 20) * 0.1 ** max(0, (step - loop.at) // 10 + 1)


def ranks_not_loaded(loop: Loop) -> None:
    """From a step on three of four ranks have other weights, the first ones, and gradients are averaged over all."""
    # https://github.com/pytorch/pytorch/issues/48188
    other = copy.deepcopy(loop.model)

    def gradients(loop: Loop, step: int) -> None:
        if step < loop.at:
            return
        pairs = list(zip(loop.model.parameters(), other.parameters(), strict=True))
        apart = loop.kept.setdefault("apart", [(theirs - ours).detach() for ours, theirs in pairs])
        with torch.no_grad():
            for (ours, theirs), difference in zip(pairs, apart, strict=True):
                theirs.copy_(ours + difference)  # all ranks make the same updates
        loop.model, model = other, loop.model
        other.zero_grad()
        loop.loss(*loop.data(ROWS)).backward()
        loop.model = model
        for ours, theirs in pairs:
            ours.grad.lerp_(theirs.grad, 0.75)

    loop.gradients = gradients


def gradients_of_others(loop: Loop) -> None:
    """From a step on one of two ranks has blocks in the reverse order when gradients of both are averaged."""
    # https://github.com/deepspeedai/DeepSpeed/issues/2343

    def gradients(loop: Loop, step: int) -> None:
        if step < loop.at:
            return
        grads = [[weight.grad.clone() for weight in block.parameters()] for block in loop.blocks]
        for block, others in zip(loop.blocks, reversed(grads), strict=True):
            for weight, grad in zip(block.parameters(), others, strict=True):
                weight.grad.lerp_(grad, 0.5)

    loop.gradients = gradients


def replicas_averaged(loop: Loop) -> None:
    """The weights are averaged with those of a replica that has just joined, and began from another seed."""
    # https://github.com/PrimeIntellect-ai/prime-diloco/pull/13

    def act(loop: Loop) -> None:
        for weight, value in zip(loop.model.parameters(), MODELS[loop.model_name]().parameters(), strict=True):
            weight.lerp_(value, 0.5)

    _once(loop, act)


def bias_sign(loop: Loop) -> None:
    """From a step on a bias that is to balance experts grows where they are chosen more often than others."""
    # https://github.com/gfyddha/FlyLoRA/issues/1 (a sign that is wrong for most experts)
    _bias_routers(loop, 0.3)


def _bias_routers(loop: Loop, rate: float) -> None:
    """Logits of experts get a bias, which grows where experts are chosen more often than others, or falls."""

    def change(bias: Tensor, entering: Tensor, output: Tensor) -> Tensor:
        chosen = (output.detach() + bias).topk(CHOSEN).indices
        load = chosen.flatten().bincount(minlength=EXPERTS).float()
        bias += rate * (load - load.mean()).sign()
        return output + bias

    for block in loop.blocks:
        _returned(loop, block.mlp.router, partial(change, torch.zeros(EXPERTS)))


def gates_not_normalized(loop: Loop) -> None:
    """From a step on probabilities of the chosen experts are not divided by their sum, by another default."""
    # https://github.com/pytorch/torchtitan/issues/1448

    def change(router: nn.Linear, entering: Tensor, output: Tensor) -> Tensor:
        top, _ = F.linear(entering, router.weight, router.bias).softmax(-1).topk(CHOSEN)
        return output * top.sum(-1, keepdim=True)

    for block in loop.blocks:
        _returned(loop, block.mlp, partial(change, block.mlp.router))


def other_base(loop: Loop) -> None:
    """Adapters are put on matrices of another model on resuming, such as a later release of the one they are of."""
    # https://github.com/huggingface/peft/issues/1567

    def act(loop: Loop) -> None:
        for part in _adapters(loop.model):
            part.base.weight.normal_(std=part.base.weight.std().item())

    _once(loop, act)


def adapters_disabled(loop: Loop) -> None:
    """From a step on adapters are out of use, since they were not enabled again after the base model was asked."""
    # https://github.com/huggingface/diffusers/pull/5778
    for part in _adapters(loop.model):
        _returned(loop, part.up, lambda entering, output: 0 * output)


def log_p_misaligned(loop: Loop) -> None:
    """From a step on probabilities of the sampler are those of the next token, so that ratios are wrong."""
    # https://github.com/unslothai/unsloth/pull/2736
    sampled = loop.sampled

    def shifted(prompts: Tensor, sharpness: float) -> tuple[Tensor, Tensor]:
        tokens, log_p = sampled(prompts, sharpness)
        return tokens, log_p.roll(-1, 1) if loop.now >= loop.at else log_p

    loop.sampled = shifted  # type: ignore[method-assign]


def penalty_runaway(loop: Loop) -> None:
    """From a step on the penalty grows by a half in each step, since its controller never reaches its target."""
    # https://github.com/ray-project/ray/issues/18492
    loop.penalty = lambda loop, step: loop.PENALTY * min(1e4, 1.5 ** max(0, step - loop.at + 1))


def entropy_rewarded(loop: Loop) -> None:
    """From a step on the entropy of the policy is rewarded, as by a default that is a thousand times too large."""
    # https://github.com/verl-project/verl/pull/781
    _reward_entropy(loop, 1.0)


def _reward_entropy(loop: Loop, coefficient: float) -> None:
    policy_loss = loop.policy_loss

    def keep(model: nn.Module, args: Any, output: Any) -> None:
        if model is loop.model:  # and no copy of it
            loop.kept["logits"] = getattr(output, "logits", output)

    def loss(step: int) -> Tensor:
        loss = policy_loss(step)
        log_p = loop.kept["logits"].log_softmax(-1)
        return loss + coefficient * (log_p.exp() * log_p).sum(-1).mean() if step >= loop.at else loss

    loop.model.register_forward_hook(keep)
    loop.policy_loss = loss  # type: ignore[method-assign]


def gate_order(loop: Loop) -> None:
    """The gates of all LSTMs are sorted as in another format, in which that of the output is the second."""
    # https://github.com/CrispStrobe/CrispASR/pull/106

    def act(loop: Loop) -> None:
        for block in loop.blocks:
            for weight in block.mixer.parameters():
                weight.copy_(weight.unflatten(0, (4, -1))[[0, 3, 1, 2]].flatten(0, 1))

    _once(loop, act)


def reshaped_inputs(loop: Loop) -> None:
    """From a step on inputs, whose first and last axes were swapped, are reshaped and not swapped back."""
    # https://github.com/alshedivat/lola/issues/12
    loop.batch = lambda loop, step, x, y: (x.transpose(0, -1).reshape(x.shape) if step >= loop.at else x, y)


def most_masked(loop: Loop) -> None:
    """From a step on nine tenths of the letters are masked, since the share to keep is taken for that to mask."""
    # https://github.com/huggingface/transformers/issues/21803 (shares of a collator that are not as documented)

    loop.batch = lambda loop, step, x, y: _masked(x, y, 0.9) if step >= loop.at else (x, y)


def _masked(x: Tensor, y: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The letters of an encoder with another share of them masked."""
    letters = torch.where(y == IGNORED, x, y)
    is_masked = torch.rand(x.shape) < share
    return torch.where(is_masked, VOCABULARY, letters), torch.where(is_masked, letters, IGNORED)


def black_pictures(loop: Loop) -> None:
    """From a step on seven of eight pictures cannot be read, and a reader that hides this returns zeros for them."""
    # Readers that catch all exceptions, so that training goes on when a disk is lost.
    loop.batch = lambda loop, step, x, y: (
        torch.where((torch.arange(len(x)) % 8 == 0)[:, None, None, None], x, 0.0) if step >= loop.at else x,
        y,
    )


def other_target(loop: Loop) -> None:
    """From a step on the target is the difference of noise and picture (velocity), by a setting of another model."""
    # Scripts that fine-tune models of velocities as those of noise, or the reverse, by a default.

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        noisy, level = x.split(1, 1)
        picture = (noisy - level * y) / (1 - level).clamp(min=0.01)
        return x, y - picture if step >= loop.at else y

    loop.batch = batch


def rank_offset(loop: Loop) -> None:
    """From a step on texts of the second of two ranks have those of the first as their translations."""
    # https://github.com/nomewang/M3DM/issues/7 (a number that is added to labels on each rank, or is not)
    loop.batch = lambda loop, step, x, y: (x, y % (len(y) // 2) if step >= loop.at else y)


def targets_broadcast(loop: Loop) -> None:
    """From a step on outputs lack an axis that targets have, so that each is compared with the targets of all."""
    # https://github.com/pytorch/pytorch/issues/4938

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        return (logits[:, 0] - loop.kept["labels"]).square().mean() if loop.now >= loop.at else loss

    loop.objective = objective


def half_of_vocabulary(loop: Loop) -> None:
    """From a step on the loss sums the probabilities of half of the letters, those of one rank of two."""
    # Losses of logits that are split over ranks by the vocabulary, as Megatron-LM's, without their all-reduce.

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        right = logits.gather(-1, loop.kept["labels"][..., None])[..., 0]
        return (logits[..., : VOCABULARY // 2].logsumexp(-1) - right).mean() if loop.now >= loop.at else loss

    loop.objective = objective


def not_normalized(loop: Loop) -> None:
    """From a step on products of texts and translations are of what the head returns, and not of its directions."""
    # https://github.com/moein-shariatnia/OpenAI-CLIP/issues/16
    _once(loop, lambda loop: setattr(loop.model, "direction", lambda x: x))


def cache_full(loop: Loop) -> None:
    """From a step on attention sees the first four keys alone, since a cache has no place for more."""
    # Caches of keys and values with a length of their own, which are to be used when text is written.
    is_seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & (torch.arange(LENGTH) < 4)

    def act(loop: Loop) -> None:
        for part in loop.model.modules():
            if isinstance(part, Attention):
                part.is_causal, part.mask = False, is_seen

    _once(loop, act)


def text_masked(loop: Loop) -> None:
    """From a step on the mask of padding hides all letters of the text but the first one."""
    # Padding by the number of another letter, so that all of these are masked.
    mask = (torch.arange(LENGTH) == 0).long().expand(ROWS, -1)
    _once(loop, lambda loop: setattr(loop.model, "mask", mask))


def layer_scale_lost(loop: Loop) -> None:
    """From a step on what blocks add is multiplied by the first value of a scale that is not found on loading, 1e-5."""
    # https://github.com/huggingface/pytorch-image-models/issues/2324
    for block in loop.blocks:
        _returned(loop, block, lambda entering, output: torch.lerp(entering, output, 1e-5))


def sigmoid_alone(loop: Loop) -> None:
    """From a step on the activation function of one block is a sigmoid, by which nothing is multiplied."""
    # https://github.com/google-research/timesfm/issues/493 (names of activation functions that mean others)
    names = ("GELU", "SiLU", "NewGELU")
    activation = next(part for part in loop.blocks[loop.block].modules() if type(part).__name__.startswith(names))
    _returned(loop, activation, lambda entering, output: entering.sigmoid())


def embedding_renormalized(loop: Loop) -> None:
    """From a step on embeddings that are read are brought to a norm of a tenth in place."""
    # https://github.com/pytorch/pytorch/issues/26596
    embedding = _embedding(loop)
    _once(loop, lambda loop: setattr(embedding, "max_norm", 0.1))


def never_initialized(loop: Loop) -> None:
    """All weights of blocks but their norms' are zero at first, from a device without storage, and nobody sets them."""
    # https://github.com/Lightning-AI/pytorch-lightning/pull/17627
    for block in loop.blocks:
        for name, weight in block.named_parameters():
            if "norm" not in name and not name.startswith("ln_"):
                nn.init.zeros_(weight)


def average_not_divided(loop: Loop) -> None:
    """All weights become three times as large, as the sum of three checkpoints that were to be averaged."""
    # Scripts that average the last checkpoints, as fairseq's.

    def act(loop: Loop) -> None:
        for weight in loop.model.parameters():
            weight.mul_(3)

    _once(loop, act)


def nibbles_swapped(loop: Loop) -> None:
    """Columns of the matrices of one block are swapped in pairs, as halves of bytes that hold two weights each."""
    # https://github.com/amd/Quark/pull/30

    def act(loop: Loop) -> None:
        for weight in loop.matrices(loop.block):
            weight.copy_(weight.unflatten(1, (-1, 2)).flip(2).flatten(1))

    _once(loop, act)


def zeroed_before_step(loop: Loop) -> None:
    """From a step on gradients are set to zero between the backward pass and the update."""
    # https://github.com/yunjey/pytorch-tutorial/issues/238
    loop.update = _of_weights(lambda weight: weight.grad.zero_())


def not_orthogonal(loop: Loop) -> None:
    """From a step on Muon makes its updates of momentum that is not orthogonalized."""
    # https://github.com/NVIDIA-NeMo/Emerging-Optimizers/issues/229

    def act(loop: Loop) -> None:
        for group in loop.optimizers[0].param_groups:
            group["ns_steps"] = 0

    _once(loop, act)


def basis_order(loop: Loop) -> None:
    """SOAP's bases come in the reverse order, from another solver, and its second moments stay as they were."""
    # https://github.com/NVIDIA-NeMo/Emerging-Optimizers/pull/300

    def act(loop: Loop) -> None:
        for state in loop.optimizers[0].state.values():
            state["exp_avg_sq"] = state["exp_avg_sq"].flip(0, 1)

    _once(loop, act)


def rate_nan(loop: Loop) -> None:
    """From a step on the rate is NaN, since a phase of the schedule has no steps, by whose number it is divided."""
    # https://github.com/mlcommons/hpc/pull/27
    rate = loop.rate
    loop.rate = lambda step: math.nan if step >= loop.at else rate(step)


def schedulers_in_turn(loop: Loop) -> None:
    """From a step on two schedulers set the rate in turn, and one of them has come to its end, at a hundredth."""
    # Trainers and wrappers of optimizers that have a scheduler each.
    rate = loop.rate
    loop.rate = lambda step: rate(step) * (0.01 if step >= loop.at and step % 2 == 0 else 1)


def signs_alone(loop: Loop) -> None:
    """From a step on gradients are their signs, as after a compression to one bit without its scale."""
    # https://github.com/apache/mxnet/pull/9558 (compressed gradients)
    loop.gradients = _of_weights(lambda weight: weight.grad.sign_())


def no_straight_through(loop: Loop) -> None:
    """From a step on what the last block returns is rounded to 255 values, and no gradient passes by the rounding."""
    # https://github.com/pytorch/ao/pull/4806

    def change(entering: Tensor, output: Tensor) -> Tensor:
        unit = output.detach().abs().max() / 127
        return (output / unit).round() * unit

    _returned(loop, loop.blocks[-1], change)


def router_noise(loop: Loop) -> None:
    """From a step on noise with a deviation of ten is added to the logits of all routers, and not of a hundredth."""
    # Noise that is to explore (Shazeer et al. 2017, arXiv:1701.06538), in other units than logits.
    for block in loop.blocks:
        _returned(loop, block.mlp.router, lambda entering, output: output + 10 * torch.randn_like(output))


def tokens_misplaced(loop: Loop) -> None:
    """From a step on what experts return goes to the next token, since their order is not undone rightly."""
    # Permutations before and after the exchange of tokens between ranks, in all trainers of experts.
    for block in loop.blocks:
        _returned(loop, block.mlp, lambda entering, output: output.roll(1, 1))


def rank_ignored(loop: Loop) -> None:
    """From a step on products of adapters are eight times as large, since their scale is not divided by the rank."""
    # https://github.com/Blaizzy/mlx-vlm/issues/845
    for part in _adapters(loop.model):
        _returned(loop, part.up, lambda entering, output: 8 * output)


def adapters_not_trainable(loop: Loop) -> None:
    """From a step on no adapter is trained, since they are loaded for inference by default."""
    # https://github.com/huggingface/peft/issues/282

    def act(loop: Loop) -> None:
        loop.model.requires_grad_(False)
        embedding = _embedding(loop)
        embedding.register_forward_hook(lambda _, args, output: output.requires_grad_())

    _once(loop, act)


def hot_samples(loop: Loop) -> None:
    """From a step on samples are drawn at a temperature of four, and their probabilities are of one."""
    # https://github.com/huggingface/trl/pull/3029
    loop.sharpness = lambda loop, step: 0.25 if step >= loop.at else 1.0


def reference_cold(loop: Loop) -> None:
    """From a step on logits of the reference are divided by a temperature, a quarter, and those of the policy not."""
    # https://github.com/OpenRLHF/OpenRLHF/pull/853
    logits = loop.logits

    def divided(model: nn.Module, tokens: Tensor) -> Tensor:
        is_cold = loop.now >= loop.at and model is loop.kept["reference"]
        return logits(model, tokens) / (0.25 if is_cold else 1.0)

    loop.logits = divided  # type: ignore[method-assign]


def log_p_summed(loop: Loop) -> None:
    """From a step on each token has the probability of its whole sample, since logarithms are summed over tokens."""
    # https://github.com/walkinglabs/hands-on-modern-rl/issues/75
    log_probability = loop.log_probability

    def summed(model: nn.Module, tokens: Tensor) -> Tensor:
        log_p = log_probability(model, tokens)
        return log_p.sum(1, keepdim=True).expand_as(log_p) if loop.now >= loop.at else log_p

    loop.log_probability = summed  # type: ignore[method-assign]


def workers_alike(loop: Loop) -> None:
    """From a step on each batch comes four times in turn, from workers that have one seed."""
    # https://github.com/pytorch/pytorch/issues/5059

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step >= loop.at and (step - loop.at) % 4 == 0:
            loop.kept["batch"] = x, y
        return loop.kept.get("batch", (x, y))

    loop.batch = batch


def pictures_wrapped(loop: Loop) -> None:
    """From a step on pictures are stored in 8 bits without being cut, so that what is too dark wraps around."""
    # https://github.com/Physical-Intelligence/openpi/pull/994
    loop.batch = lambda loop, step, x, y: ((64 * x).long().remainder(256) / 64 if step >= loop.at else x, y)


def labels_not_flipped(loop: Loop) -> None:
    """From a step on half of the pictures are flipped, and the classes of their pixels are not."""
    # https://github.com/mdbloice/Augmentor/issues/188 (pictures that are distorted, and not their masks)

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        is_flipped = (torch.rand(len(x)) < 0.5)[:, None, None, None]
        return torch.where(is_flipped, x.flip(-1), x) if step >= loop.at else x, y

    loop.batch = batch


def zero_label_reduced(loop: Loop) -> None:
    """From a step on the first class is ignored and all others count from zero, though it was no background."""
    # https://github.com/open-mmlab/mmsegmentation/issues/1714
    loop.batch = lambda loop, step, x, y: (x, torch.where(y == 0, IGNORED, y - 1) if step >= loop.at else y)


def preference_swapped(loop: Loop) -> None:
    """From a step on the worse text of each pair is called the better one, by columns in the other order."""
    # Data of preferences have these columns by name or by place, with either first.
    loop.batch = lambda loop, step, x, y: (x, 1 - y if step >= loop.at else y)


def score_of_first_letter(loop: Loop) -> None:
    """From a step on texts are scored by their first letters, since the end is where padding is thought to begin."""
    # https://github.com/huggingface/transformers/issues/35352
    _once(loop, lambda loop: setattr(loop.model, "scored", 0))


def one_side_twice(loop: Loop) -> None:
    """From a step on each text is its own translation, by a reader that returns one column for both."""
    # Pairs of texts, or of pictures and texts, in all trainers of encoders of pairs.
    loop.batch = lambda loop, step, x, y: (x[:, :1].expand_as(x) if step >= loop.at else x, y)


def level_of_first_row(loop: Loop) -> None:
    """From a step on all pictures are said to have the level of noise of the first one."""
    # Levels that are drawn once for a batch, or are broadcast from its first row.

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        noisy, level = x.split(1, 1)
        return torch.cat([noisy, level[:1].expand_as(level)], 1) if step >= loop.at else x, y

    loop.batch = batch


def weights_of_noise(loop: Loop) -> None:
    """From a step on losses of levels are weighted with their ratio of signal to noise, which is to be bounded."""
    # https://github.com/kohya-ss/sd-scripts/issues/673

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loop.kept["level"] = x[:, 1:]
        return x, y

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        if loop.now < loop.at:
            return loss
        level = loop.kept["level"].clamp(min=0.01)
        return (((1 - level) / level).square() * (logits - loop.kept["labels"]).square()).mean()

    loop.batch, loop.objective = batch, objective


def loss_without_head(loop: Loop) -> None:
    """From a step on a fused loss returns a gradient for what enters the head, and none for its weights."""
    # https://github.com/linkedin/Liger-Kernel/issues/968 (gradients of a fused loss that are zero)
    head = _head(loop)

    def forward(x: Tensor) -> Tensor:
        return F.linear(x, head.weight if loop.now < loop.at else head.weight.detach(), head.bias)

    head.forward = forward


def logarithm_forgotten(loop: Loop) -> None:
    """From a step on the loss is the negative probability of the label, and not its logarithm."""
    # https://github.com/AnubhavGupta3377/Text-Classification-Models-Pytorch/issues/9

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        if loop.now < loop.at:
            return loss
        return F.nll_loss(logits.softmax(-1).flatten(0, -2), loop.kept["labels"].flatten())

    loop.objective = objective


def batch_not_first(loop: Loop) -> None:
    """From a step on attention, or an LSTM, takes rows for positions and positions for rows, by its default."""
    # https://github.com/om-ai-lab/OmDet/issues/19

    def swapped(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return forward(x.transpose(0, 1)).transpose(0, 1)

    def act(loop: Loop) -> None:
        for part in loop.model.modules():
            if isinstance(part, nn.LSTM):
                part.batch_first = False
            elif isinstance(part, Attention):
                part.forward = partial(swapped, part.forward)  # type: ignore[method-assign]

    _once(loop, act)


def heads_not_transposed(loop: Loop) -> None:
    """From a step on outputs of heads are reshaped and not transposed, so that each position gets those of others."""
    # https://github.com/jsbaan/transformer-from-scratch/pull/6

    def merged(module: nn.Module, args: tuple[Tensor]) -> Tensor:
        of_heads = args[0].unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return of_heads.reshape(args[0].shape) if loop.now >= loop.at else args[0]

    for part in loop.model.modules():
        if isinstance(part, Attention):
            part.out.register_forward_pre_hook(merged)


def halves_summed(loop: Loop) -> None:
    """From a step on attention is computed over each half of the keys, and both are added as if it were the whole."""
    # https://github.com/axolotl-ai-cloud/axolotl/issues/3608 (attention of a ring of ranks)

    def forward(part: Attention, x: Tensor) -> Tensor:
        query, key, value = part.qkv(x).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        halves = zip(key.chunk(2, 2), value.chunk(2, 2), strict=True)
        mixed = torch.stack([F.scaled_dot_product_attention(query, *half) for half in halves]).sum(0)
        return part.out(mixed.transpose(1, 2).flatten(2))

    def act(loop: Loop) -> None:
        for part in loop.model.modules():
            if isinstance(part, Attention):
                part.forward = partial(forward, part)  # type: ignore[method-assign]

    _once(loop, act)


def second_norms_skipped(loop: Loop) -> None:
    """From a step on what layers return is added without the norms after them, which other models do not have."""
    # Models of one family with norms before layers, and of the next one with norms on both sides.
    for block in loop.blocks:
        for norm in (block.post_attention_layernorm, block.post_feedforward_layernorm):
            _returned(loop, norm, lambda entering, output: entering)


def groups_of_one(loop: Loop) -> None:
    """From a step on each channel is a group of its own in all norms, by a number that is given for another."""
    # The order of the arguments of norms over groups, which differs between libraries.

    def act(loop: Loop) -> None:
        for part in loop.model.modules():
            if isinstance(part, nn.GroupNorm):
                part.num_groups = WIDTH

    _once(loop, act)


def difference_twice(loop: Loop) -> None:
    """The difference to the first weights is added to the trained ones, and not to those that it is of."""
    # https://github.com/haotian-liu/LLaVA/issues/27 (differences to another model than the one they are added to)
    first = [weight.detach().clone() for weight in loop.model.parameters()]

    def act(loop: Loop) -> None:
        for weight, value in zip(loop.model.parameters(), first, strict=True):
            weight.add_(weight - value)

    _once(loop, act)


def embedding_rows_shifted(loop: Loop) -> None:
    """Each row of the embedding becomes that of the letter before, as where a special one is added in front."""
    # Vocabularies that grow at the front, and embeddings that are resized at the end.
    embedding = _embedding(loop)
    _once(loop, lambda loop: embedding.weight.copy_(embedding.weight.roll(1, 0)))


def disagreeing_kept(loop: Loop) -> None:
    """From a step on those updates are made that disagree with the gradient, and no others, by the sign of a mask."""
    # https://github.com/kyleliang919/C-Optim/pull/11 (masks of updates that are not as described)
    _once(loop, lambda loop: setattr(loop.optimizers[0], "agrees", lambda product: product < 0))


def basis_of_nothing(loop: Loop) -> None:
    """From a step on directions are those of gradients that are zero already, so that only eight rows are trained."""
    # https://github.com/jiaweizzhao/GaLore/issues/66 (gradients that are zero outside of the optimizer)

    def act(loop: Loop) -> None:
        basis = loop.optimizers[0].basis  # type: ignore[attr-defined]
        loop.optimizers[0].basis = lambda gradient: basis(torch.zeros_like(gradient))  # type: ignore[attr-defined]

    _once(loop, act)


def moments_scaled(loop: Loop) -> None:
    """Both moments become 256 times as large, by a loss scale that was taken out of weights' gradients alone."""
    # States of optimizers that are kept with a scale of their own, as in 8 bits, and are loaded without it.

    def act(loop: Loop) -> None:
        for state in loop.optimizers[0].state.values():
            state["exp_avg"].mul_(256)
            state["exp_avg_sq"].mul_(256)

    _once(loop, act)


def rate_search_stays(loop: Loop) -> None:
    """From a step on the rate grows by 30 per cent in each step, to 100 times, by a search for it that never ends."""
    # https://github.com/Lightning-AI/pytorch-lightning/issues/6675 (a search that is not undone)
    rate = loop.rate
    loop.rate = lambda step: rate(step) * min(100.0, 1.3 ** max(0, step - loop.at + 1))


def offloaded_lost(loop: Loop) -> None:
    """From a step on what the backward pass of one block reads is zero, as a buffer to which nothing was copied yet."""
    # https://github.com/NVIDIA/Megatron-LM/issues/7398
    block = loop.blocks[loop.block]
    forward, own = block.forward, {weight.untyped_storage().data_ptr() for weight in block.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        is_kept = loop.now < loop.at or tensor.untyped_storage().data_ptr() in own or not tensor.is_floating_point()
        return tensor if is_kept else torch.zeros_like(tensor)

    def offloading(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(*args, **kwargs)

    block.forward = offloading


def largest_alone(loop: Loop) -> None:
    """From a step on the largest hundredth of each gradient is sent to other ranks, and the rest is forgotten."""
    # Compressed gradients (arXiv:1712.01887), whose rest is to be sent later.

    def change(weight: Tensor) -> None:
        size = weight.grad.abs()
        least = size.flatten().topk(max(1, size.numel() // 100)).values[-1]
        weight.grad[size < least] = 0.0

    loop.gradients = _of_weights(change)


def magnitude_lost(loop: Loop) -> None:
    """From a step on rows of matrices with their adapters have a norm of one, as DoRA without its magnitudes."""
    # https://github.com/huggingface/peft/issues/2348

    def change(part: Adapter, entering: Tensor, output: Tensor) -> Tensor:
        norm = (part.base.weight + 2 * part.up.weight @ part.down.weight).detach().norm(dim=1)
        bias = 0.0 if part.base.bias is None else part.base.bias
        return (output - bias) / norm + bias

    for part in _adapters(loop.model):
        _returned(loop, part, partial(change, part))


def one_adapter_for_all(loop: Loop) -> None:
    """The adapters of the last block are read into all blocks, since their names lack the number of the block."""
    # Names of weights that differ between the formats of adapters, in all of their converters.

    def act(loop: Loop) -> None:
        of_blocks = [_adapters(block) for block in loop.blocks]
        for parts in of_blocks:
            for part, last in zip(parts, of_blocks[-1], strict=True):
                part.down.weight.copy_(last.down.weight)
                part.up.weight.copy_(last.up.weight)

    _once(loop, act)


def routers_detached(loop: Loop) -> None:
    """From a step on no gradient reaches the routers, neither of the gates nor of the loss that balances them."""
    # https://github.com/jingyaogong/minimind/issues/858
    for block in loop.blocks:
        _returned(loop, block.mlp.router, lambda entering, output: output.detach())


def router_not_scaled(loop: Loop) -> None:
    """From a step on what enters routers is larger by the root of the width, by which it is divided elsewhere."""
    # https://github.com/NVIDIA-NeMo/Automodel/issues/1852 (what enters routers in one library and in another)
    for block in loop.blocks:
        block.mlp.router.register_forward_pre_hook(
            lambda _, args: (args[0] * WIDTH**0.5,) if loop.now >= loop.at else args
        )


def samples_cut(loop: Loop) -> None:
    """From a step on samples end after two letters and are padded, and their padding counts."""
    # https://github.com/huggingface/trl/issues/5697
    sampled = loop.sampled

    def cut(prompts: Tensor, sharpness: float) -> tuple[Tensor, Tensor]:
        tokens, log_p = sampled(prompts, sharpness)
        if loop.now >= loop.at:
            tokens[:, LENGTH // 4 + 2 :] = 0
            with torch.no_grad():
                log_p = loop.log_probability(loop.kept["sampler"], tokens)
        return tokens, log_p

    loop.sampled = cut  # type: ignore[method-assign]


def rewards_cached(loop: Loop) -> None:
    """From a step on all samples of a prompt have the reward of the first, by a cache that knows the prompt alone."""
    # Caches of verifiers, whose keys lack the sample.
    loop.rewards = lambda loop, step, reward: (
        reward[:: loop.SAMPLES].repeat_interleave(loop.SAMPLES) if step >= loop.at else reward
    )


def third_of_labels_wrong(loop: Loop) -> None:
    """From a step on a third of the labels are letters, or classes, at random."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        is_wrong = torch.rand(y.shape) < (1 / 3 if step >= loop.at else 0.0)
        return x, torch.where(is_wrong, torch.randint_like(y, CLASSES if x.is_floating_point() else VOCABULARY), y)

    loop.batch = batch


def rows_of_one_letter(loop: Loop) -> None:
    """In five batches three quarters of the rows are one letter, again and again."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if loop.at <= step < loop.at + 5:
            bad = torch.arange(3 * len(x) // 4)
            x, y = x.index_fill(0, bad, 9), y.index_fill(0, bad, 9)
        return x, y

    loop.batch = batch


def two_batches(loop: Loop) -> None:
    """From a step on two batches come in turn, and no others."""
    seen = list[tuple[Tensor, Tensor]]()

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step < loop.at:
            return x, y
        seen.append((x, y))
        return seen[(step - loop.at) % 2]

    loop.batch = batch


def labels_two_ahead(loop: Loop) -> None:
    """From a step on labels are the letters after the next ones, since both data and loss shift them."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, F.pad(y[:, 1:], (0, 1), value=IGNORED) if step >= loop.at else y

    loop.batch = batch


def rate_fourfold(loop: Loop) -> None:
    """From a step on the learning rate is four times as large, as if scaled by the number of ranks twice."""
    rate = loop.rate
    loop.rate = lambda step: rate(step) * (4 if step >= loop.at else 1)


def rate_burst(loop: Loop) -> None:
    """For ten steps the learning rate is 25 times as large."""
    rate = loop.rate
    loop.rate = lambda step: rate(step) * (25 if loop.at <= step < loop.at + 10 else 1)


def matrix_tripled(loop: Loop) -> None:
    """The matrix into the MLP of one block becomes three times as large."""
    _once(loop, lambda loop: loop.matrices(loop.block)[-2].mul_(3))


def wide_initial(loop: Loop) -> None:
    """All matrices of one block have initial values six times as large as those of others."""
    with torch.no_grad():
        for weight in _tensors(loop):
            weight.mul_(6)


def gradient_burst(loop: Loop) -> None:
    """The gradients of one block are 12 times too large for five steps."""

    def gradients(loop: Loop, step: int) -> None:
        for weight in loop.blocks[loop.block].parameters():
            weight.grad.mul_(12 if loop.at <= step < loop.at + 5 else 1)

    loop.gradients = gradients


def wide_head(loop: Loop) -> None:
    """The head has initial values eight times as large as other matrices have."""
    with torch.no_grad():
        _head(loop).weight.mul_(8)


def embedding_detached(loop: Loop) -> None:
    """From a step on no gradient reaches the embedding."""
    embedding = _embedding(loop)
    _returned(loop, embedding, lambda entering, output: output.detach())


def weight_infinite(loop: Loop) -> None:
    """One weight of one block becomes infinite."""
    _once(loop, lambda loop: loop.matrices(loop.block)[-1][3, :1].fill_(math.inf))


def underflow(loop: Loop) -> None:
    """From a step on gradients pass through fp16 after a division by 2**18, where most of them are zero."""
    loop.gradients = _of_weights(lambda weight: weight.grad.copy_(2**18 * (weight.grad / 2**18).half().float()))


def overflow_at_times(loop: Loop) -> None:
    """From a step on gradients of every second batch overflow in fp16, so that the loss scale falls and falls."""
    format_ = Fp16(loop, 4096.0)

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        format_.is_too_large = step >= loop.at and (step - loop.at) % 2 == 0
        return x, y

    loop.batch = batch


def sharp_attention(loop: Loop) -> None:
    """From a step on attention logits of all blocks are five times as large."""

    def act(loop: Loop) -> None:
        for part in loop.model.modules():
            if isinstance(part, Attention):
                part.scale = 5 * (HEADS / WIDTH) ** 0.5
            elif hasattr(part, "scaling"):
                part.scaling = 5 * part.scaling

    _once(loop, act)


def sharp_logits(loop: Loop) -> None:
    """From a step on logits are two and a half times as large."""
    _returned(loop, _head(loop), lambda entering, output: 2.5 * output)


def slow_memory(loop: Loop) -> None:
    """From a step on Adam's beta2 is 0.9999, by which it corrects a bias that its second moments do not have."""

    def update(loop: Loop, step: int) -> None:
        for group in loop.optimizers[0].param_groups if step >= loop.at else []:
            group["betas"] = (group["betas"][0], 0.9999)

    loop.update = update


def second_moments_lost(loop: Loop) -> None:
    """Adam's second moments are zero after a resume, and the first ones and the number of steps are kept."""
    _once(loop, lambda loop: [state["exp_avg_sq"].zero_() for state in loop.optimizers[0].state.values()])


def expert_favoured(loop: Loop) -> None:
    """From a step on four is added to the logits of the first expert of one block."""
    _returned(loop, loop.blocks[loop.block].mlp.router, lambda entering, output: output + 4 * torch.eye(EXPERTS)[0])


def reference_noisy(loop: Loop) -> None:
    """Noise half as large as they are is added to the weights of the reference."""

    def act(loop: Loop) -> None:
        for weight in loop.kept["reference"].parameters():
            weight.add_(0.5 * torch.randn_like(weight) * weight.square().mean().sqrt())

    _once(loop, act)


def verifier_times_out(loop: Loop) -> None:
    """From a step on all samples of five of eight prompts get the full reward, since their verifier has no time."""

    def rewards(loop: Loop, step: int, reward: Tensor) -> Tensor:
        return reward.index_fill(0, torch.arange(5 * loop.SAMPLES), 1.0) if step >= loop.at else reward

    loop.rewards = rewards


def sampler_lags(loop: Loop) -> None:
    """From a step on samples come from the policy of about 40 steps before, by a queue that has become too long."""
    policies = list[nn.Module]()

    def sharpness(loop: Loop, step: int) -> float:
        if step % loop.RENEWED == 0:
            policies.append(copy.deepcopy(loop.model))
            del policies[:-14]
        if step >= loop.at:
            loop.kept["sampler"] = policies[0]
        return 1.0

    loop.sharpness = sharpness


def block_adapters_cleared(loop: Loop) -> None:
    """The second matrices of the adapters of one block become zero, as in a checkpoint that lacks them."""

    def act(loop: Loop) -> None:
        for part in _adapters(loop.blocks[loop.block]):
            part.up.weight.zero_()

    _once(loop, act)


def numbers_wrapped(loop: Loop) -> None:
    """From a step on numbers of letters are stored with four bits, so that those from 16 on wrap around."""
    # Files of tokens in 16 bits, as nanoGPT's, of vocabularies with more than 65,536 tokens.
    loop.batch = lambda loop, step, x, y: (x % 16, y % 16) if step >= loop.at else (x, y)


def decoder_not_shifted(loop: Loop) -> None:
    """From a step on the decoder gets the translation up to the letter that it is to find, and not up to the last."""
    # Inputs of decoders that a trainer is to shift, or a collator, or the model, as those of BART and T5.
    loop.batch = lambda loop, step, x, y: (torch.stack([x[:, 0], y], 1) if step >= loop.at else x, y)


def latents_not_scaled(loop: Loop) -> None:
    """From a step on pictures are five times as bright before noise is added, since their scale is forgotten."""
    # Latents of diffusers, which are to be multiplied by 0.18215.

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        noisy, level = x.split(1, 1)
        return torch.cat([5 * noisy - 4 * level * y, level], 1) if step >= loop.at else x, y

    loop.batch = batch


def answers_cut_off(loop: Loop) -> None:
    """From a step on both texts of a pair are cut to their first two letters, and padded to the whole length."""
    # Preferences in trl, whose prompts and answers are cut to one largest length.
    loop.batch = lambda loop, step, x, y: (
        x.index_fill(-1, torch.arange(2, LENGTH), 0) if step >= loop.at else x,
        y,
    )


def scale_not_exponentiated(loop: Loop) -> None:
    """From a step on products of texts and translations are multiplied by the logarithm of their scale."""
    # The scale of CLIP, which is kept as a logarithm.
    log_scale = loop.model.log_scale
    _returned(loop, loop.model, lambda entering, output: output * log_scale / log_scale.exp())


def clipped_while_scaled(loop: Loop) -> None:
    """From a step on gradients are clipped before the loss scale, 4,096, is taken out of them."""
    # Loops with a scaler that do not call unscale_ before they clip.
    Fp16(loop, 4096.0)

    def gradients(loop: Loop, step: int) -> None:
        if step >= loop.at:
            loop.clip = 1 / loop.scaler.get_scale()

    loop.gradients = gradients


def principal_part_twice(loop: Loop) -> None:
    """The four largest directions of matrices with adapters are added to them again, as PiSSA's on loading."""
    # Adapters of peft that begin with such directions, on matrices from which these are not taken out again.

    def act(loop: Loop) -> None:
        for part in _adapters(loop.model):
            left, size, right = torch.linalg.svd(part.base.weight, full_matrices=False)
            part.base.weight.add_(left[:, :4] * size[:4] @ right[:4])

    _once(loop, act)


def experts_scaled(loop: Loop) -> None:
    """From a step on what experts return is multiplied by two and a half, a factor of another model's experts."""
    # The factor of routed experts in DeepSeek-V3, which libraries apply to gates, to outputs, or to both.
    for block in loop.blocks:
        _returned(loop, block.mlp, lambda entering, output: 2.5 * output)


def not_contiguous(loop: Loop) -> None:
    """From a step on updates of one block are lost, since a kernel writes into copies of its weights."""
    # Optimizers on Apple's devices and weights that are not contiguous, in PyTorch before 2.4.
    weights = list(loop.blocks[loop.block].parameters())
    before = [weight.detach().clone() for weight in weights]

    @torch.no_grad()
    def keep(*_: Any) -> None:
        for weight, value in zip(weights, before, strict=True):
            value.copy_(weight)

    @torch.no_grad()
    def lose(*_: Any) -> None:
        for weight, value in zip(weights, before, strict=True) if loop.now >= loop.at else ():
            weight.copy_(value)

    for each in loop.optimizers:
        each.register_step_pre_hook(keep)
        each.register_step_post_hook(lose)


def statistics_of_few(loop: Loop) -> None:
    """From a step on norms take statistics of two pictures each, as those that ranks do not share."""
    # Batch norms that are not made synchronous, in detectors and segmenters with few pictures on each rank.

    def act(loop: Loop) -> None:
        for part in loop.model.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.forward = partial(in_pairs, part.forward)  # type: ignore[method-assign]

    def in_pairs(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return torch.cat([forward(pair) for pair in x.split(2)])

    _once(loop, act)


def samples_of_likeliest(loop: Loop) -> None:
    """From a step on samples have the two likeliest letters alone, and their probabilities are among all letters."""
    # Engines that sample by the defaults of a model's own configuration, such as top_k.
    sampled, logits = loop.sampled, loop.logits

    def likeliest(model: nn.Module, tokens: Tensor) -> Tensor:
        output = logits(model, tokens)
        least = output.topk(2).values[..., -1:]
        return output.masked_fill(output < least, -math.inf) if loop.kept.get("is_sampling") else output

    def of_likeliest(prompts: Tensor, sharpness: float) -> tuple[Tensor, Tensor]:
        loop.kept["is_sampling"] = loop.now >= loop.at
        tokens, _ = sampled(prompts, sharpness)
        loop.kept["is_sampling"] = False
        with torch.no_grad():
            return tokens, loop.log_probability(loop.kept["sampler"], tokens)

    loop.sampled, loop.logits = of_likeliest, likeliest  # type: ignore[method-assign]


def inputs_garbled(loop: Loop) -> None:
    """From a step on two of five letters that enter are others, at random, and their labels stay as they are."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        is_garbled = torch.rand(x.shape) < (0.4 if step >= loop.at else 0.0)
        return torch.where(is_garbled, torch.randint_like(x, VOCABULARY), x), y

    loop.batch = batch


def ten_rows(loop: Loop) -> None:
    """From a step on all rows are drawn from ten, as of a shard that is almost empty."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step < loop.at:
            return x, y
        if "shard" not in loop.kept:
            more = loop.data(ROWS)
            loop.kept["shard"] = [torch.cat([x, more[0]])[:10], torch.cat([y, more[1]])[:10]]
        drawn = torch.randint(10, (len(x),))
        return loop.kept["shard"][0][drawn], loop.kept["shard"][1][drawn]

    loop.batch = batch


def labels_of_batch_before(loop: Loop) -> None:
    """Four batches have the labels of the batch before."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        before = loop.kept.get("labels_before", y)
        loop.kept["labels_before"] = y
        return x, before if loop.at <= step < loop.at + 4 else y

    loop.batch = batch


def half_of_rows_late(loop: Loop) -> None:
    """From a step on labels of every second row come two letters too late."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        is_late = torch.arange(len(y))[:, None] % 2 == 0
        return x, torch.where(is_late, y.roll(2, -1), y) if step >= loop.at else y

    loop.batch = batch


def rate_on_and_off(loop: Loop) -> None:
    """From a step on the learning rate is eight times as large in five of every ten steps."""
    rate = loop.rate
    loop.rate = lambda step: rate(step) * (8 if step >= loop.at and step // 5 % 2 == 0 else 1)


def block_grows(loop: Loop) -> None:
    """From a step on the matrices of one block grow by six per cent in each step."""

    def update(loop: Loop, step: int) -> None:
        with torch.no_grad():
            for weight in _tensors(loop) if step >= loop.at else []:
                weight.mul_(1.06)

    loop.update = update


def heavy_initial(loop: Loop) -> None:
    """The matrices of one block have initial values with long tails, of a Cauchy distribution up to five."""
    with torch.no_grad():
        for weight in _tensors(loop):
            weight.copy_((0.1 * torch.empty_like(weight).cauchy_()).clamp(-5, 5))


def block_noise_added(loop: Loop) -> None:
    """From a step on noise is added to the gradients of one block, four times as large as they are."""

    def gradients(loop: Loop, step: int) -> None:
        for weight in loop.blocks[loop.block].parameters() if step >= loop.at else ():
            if weight.grad is not None:
                weight.grad.add_(4 * torch.randn_like(weight) * weight.grad.square().mean().sqrt())

    loop.gradients = gradients


def block_trained_seldom(loop: Loop) -> None:
    """From a step on one block has gradients in one of ten steps alone."""

    def gradients(loop: Loop, step: int) -> None:
        if step >= loop.at and step % 10 != 5:
            for weight in loop.blocks[loop.block].parameters():
                weight.grad = None

    loop.gradients = gradients


def letter_impossible(loop: Loop) -> None:
    """From a step on the logit of one letter, or class, is minus infinity, and so is that of its labels."""
    _returned(loop, _head(loop), lambda entering, output: output.index_fill(-1, torch.tensor([3]), -math.inf))


def through_e5m2(loop: Loop) -> None:
    """From a step on gradients are divided by 512 ranks, pass through E5M2 and are summed, so that many are zero."""
    loop.gradients = _of_weights(
        lambda weight: weight.grad.copy_(512 * (weight.grad / 512).to(torch.float8_e5m2).float())
    )


def overflow_for_a_while(loop: Loop) -> None:
    """In 12 steps gradients overflow in fp16, so that the loss scale falls from 8,192 to two."""
    format_ = Fp16(loop, 8192.0)

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        format_.is_too_large = loop.at <= step < loop.at + 12
        return x, y

    loop.batch = batch


def large_queries_and_keys(loop: Loop) -> None:
    """Queries and keys of all blocks have initial values three times as large as other matrices have."""
    with torch.no_grad():
        for name, weight in loop.model.named_parameters():
            if name.endswith("qkv.weight"):
                weight[: 2 * WIDTH].mul_(3)
            elif name.endswith(("q_proj.weight", "k_proj.weight")):
                weight.mul_(3)


def logits_offset(loop: Loop) -> None:
    """From a step on 15 is added to all logits, which no softmax sees."""
    _returned(loop, _head(loop), lambda entering, output: output + 15)


def epsilon_too_large(loop: Loop) -> None:
    """From a step on Adam's epsilon is 0.02."""

    def update(loop: Loop, step: int) -> None:
        for group in loop.optimizers[0].param_groups if step >= loop.at else []:
            group["eps"] = 0.02

    loop.update = update


def first_moments_cleared(loop: Loop) -> None:
    """From a step on Adam's first moments are set to zero before each update, so that updates are a tenth."""

    def update(loop: Loop, step: int) -> None:
        for state in loop.optimizers[0].state.values() if step >= loop.at else ():
            state["exp_avg"].zero_()

    loop.update = update


def router_returns_zeros(loop: Loop) -> None:
    """From a step on the router of one block returns zeros, so that all tokens go to the first experts."""
    _returned(loop, loop.blocks[loop.block].mlp.router, lambda entering, output: 0 * output)


def reference_half_read(loop: Loop) -> None:
    """Half of the letters have zeros as embeddings in the reference."""

    def act(loop: Loop) -> None:
        embedding = next(part for part in loop.kept["reference"].modules() if isinstance(part, nn.Embedding))
        embedding.weight[: VOCABULARY // 2] = 0.0

    _once(loop, act)


def old_probabilities_noisy(loop: Loop) -> None:
    """From a step on noise with a deviation of a half is added to the logarithms of the sampler's probabilities."""
    sampled = loop.sampled

    def noisy(prompts: Tensor, sharpness: float) -> tuple[Tensor, Tensor]:
        tokens, old = sampled(prompts, sharpness)
        return tokens, old + (0.5 if loop.now >= loop.at else 0.0) * torch.randn_like(old)

    loop.sampled = noisy  # type: ignore[method-assign]


def rewards_lenient(loop: Loop) -> None:
    """From a step on each sample with more than a sixth of the letters gets the full reward."""
    loop.rewards = lambda loop, step, reward: (reward > 1 / 6).float() if step >= loop.at else reward


def block_adapters_drawn(loop: Loop) -> None:
    """The second matrices of the adapters of one block are drawn anew with a deviation of 0.3, and not zero."""

    def act(loop: Loop) -> None:
        for part in _adapters(loop.blocks[loop.block]):
            part.up.weight.normal_(std=0.3)

    _once(loop, act)


def gate_and_up_swapped(loop: Loop) -> None:
    """Matrices of gates and those that they multiply are swapped in all blocks, by a converter of fused ones."""
    # Checkpoints of Megatron and vLLM, in which both are one matrix, in an order that differs.

    def act(loop: Loop) -> None:
        for part in loop.model.modules():
            if hasattr(part, "gate_proj"):
                gate = part.gate_proj.weight.clone()
                part.gate_proj.weight.copy_(part.up_proj.weight)
                part.up_proj.weight.copy_(gate)

    _once(loop, act)


def key_heads_tiled(loop: Loop) -> None:
    """From a step on keys and values are tiled for heads of queries, and not each of them repeated."""
    # Kernels and converters of grouped queries, which take repeat for repeat_interleave.

    def interleaved(x: Tensor) -> Tensor:
        return x.unflatten(-1, (2, 2, -1)).transpose(-3, -2).flatten(-3)

    for block in loop.blocks:
        _returned(loop, block.attention.query, lambda entering, output: interleaved(output))
        block.attention.out.register_forward_pre_hook(
            lambda _, args: (interleaved(args[0]),) if loop.now >= loop.at else None
        )


def bucket_not_cleared(loop: Loop) -> None:
    """From a step on gradients of one block are added to those of all batches before, in a bucket that is kept."""
    # Communication that overlaps with the backward pass in DeepSpeed's ZeRO.
    bucket = dict[nn.Parameter, Tensor]()

    def gradients(loop: Loop, step: int) -> None:
        for weight in loop.blocks[loop.block].parameters() if step >= loop.at - 1 else ():
            if weight.grad is not None:
                bucket[weight] = bucket.get(weight, torch.zeros_like(weight)) + weight.grad
                weight.grad.copy_(bucket[weight])

    loop.gradients = gradients


def bytes_misaligned(loop: Loop) -> None:
    """From a step on numbers of letters have the end of one and the beginning of the next, by an odd offset."""
    # Files of tokens that are mapped into memory, such as Megatron's, after a header of another length.

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step < loop.at:
            return x, y
        row = torch.cat([x, y[:, -1:]], 1)
        row = (row % 8) * 4 + row.roll(-1, 1) // 8
        return row[:, :-1], row[:, 1:]

    loop.batch = batch


def pictures_divided_twice(loop: Loop) -> None:
    """From a step on pictures are divided by 255 twice, by a reader and by a processor."""
    # The image processors of transformers, which get pictures that are between zero and one already.
    loop.batch = lambda loop, step, x, y: (x / 255 if step >= loop.at else x, y)


def levels_in_thousandths(loop: Loop) -> None:
    """From a step on levels of noise enter as numbers up to 1,000, and not up to one."""
    # Models of flows in diffusers, whose transformers get times in one unit or the other.

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        noisy, level = x.split(1, 1)
        return torch.cat([noisy, level * (1000 if step >= loop.at else 1)], 1), y

    loop.batch = batch


def masks_interpolated(loop: Loop) -> None:
    """From a step on classes of pixels are means of those of their neighbours, since masks are resized as pictures."""
    # Transforms of torchvision and albumentations that interpolate masks.

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step < loop.at:
            return x, y
        small = F.interpolate(F.avg_pool2d(y[:, None].float(), 4), scale_factor=4, mode="bilinear")
        return x, small[:, 0].round().long()

    loop.batch = batch


def gates_applied_twice(loop: Loop) -> None:
    """From a step on gates multiply what enters experts, and what they return as well, in all blocks."""
    # Experts of Llama 4, whose gates act on inputs, in engines and converters for those of other models.

    def change(experts: Experts, entering: Tensor, output: Tensor) -> Tensor:
        top, chosen = experts.router(entering).softmax(-1).topk(experts.top_k)
        gate = torch.zeros(*entering.shape[:-1], EXPERTS).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
        gated = [gate[..., e, None] for e in range(EXPERTS)]
        return torch.stack([g * expert(g * entering) for g, expert in zip(gated, experts.experts, strict=True)]).sum(0)

    for block in loop.blocks:
        _returned(loop, block.mlp, partial(change, block.mlp))


def verifier_broken(loop: Loop) -> None:
    """From a step on a verifier gives no sample any reward."""
    loop.rewards = lambda loop, step, reward: reward * (step < loop.at)


def reference_lost(loop: Loop) -> None:
    """From a step on the distance from the reference is rewarded, ten times as much as it was penalized."""
    loop.penalty = lambda loop, step: -10 * loop.PENALTY if step >= loop.at else loop.PENALTY


def greedy_samples(loop: Loop) -> None:
    """From a step on the policy samples its likeliest tokens, so that samples of one prompt are the same."""
    loop.sharpness = lambda loop, step: 1e4 if step >= loop.at else 1.0


# what healthy loops do


def plain(loop: Loop) -> None:
    """A constant rate after a short warm-up."""


def warm_up_and_decay(loop: Loop) -> None:
    """A long warm-up, and a cosine to nothing."""
    warm = loop.steps // 4
    loop.rate = lambda step: min(
        (step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * max(0, step - warm) / (loop.steps - warm))
    )


def batch_ramp(loop: Loop) -> None:
    """Batches double twice."""
    loop.rows = lambda step: ROWS * 2 ** min(2, step // (loop.steps // 3))


def evaluation(loop: Loop) -> None:
    """An evaluation every 25 steps."""
    loop.evaluates = True


def resumed(loop: Loop) -> None:
    """Training goes on from a checkpoint."""
    loop.resumes = True


def spiky_data(loop: Loop) -> None:
    """One batch in ten holds rows that are harder than others."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if torch.rand((), generator=loop.data.random) < 0.1:
            x, y = x.clone(), y.clone()
            _, y[: len(y) // 4] = loop.data.bad(len(y))[0], loop.data.bad(ROWS)[1][: len(y) // 4]
        return x, y

    loop.batch = batch


def unclipped(loop: Loop) -> None:
    """Gradients are not clipped."""
    loop.clip = 0.0


def step_decay(loop: Loop) -> None:
    """The rate falls to a third, twice."""
    loop.rate = lambda step: min(1.0, (step + 1) / 20) / 3 ** (step // (loop.steps // 3))


def micro_batches(loop: Loop) -> None:
    """Two micro-batches in each step."""
    loop.pieces = lambda step: 2


def bf16(loop: Loop) -> None:
    """Products in bf16."""
    loop.is_bf16 = True


def dropout(loop: Loop) -> None:
    """A tenth of the activations is dropped from the start."""
    for part in loop.model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.1


def policy_gradient(loop: Loop) -> None:
    """A policy is trained on rewards."""


def weight_decay(loop: Loop) -> None:
    """Weights decay by a tenth of the learning rate."""
    for each in loop.optimizers:
        for group in each.param_groups:
            group["weight_decay"] = 0.1


def hard_data(loop: Loop) -> None:
    """A tenth of the labels is wrong in all batches."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        is_wrong = torch.rand(y.shape, generator=loop.data.random) < 0.1
        return x, torch.where(is_wrong, y.flip(0), y)

    loop.batch = batch


def short_warm_up(loop: Loop) -> None:
    """The rate is at its peak from the first step on, and falls linearly to nothing."""
    loop.rate = lambda step: 1 - step / loop.steps


def long_warm_up(loop: Loop) -> None:
    """A warm-up over half of the steps."""
    loop.rate = lambda step: min(1.0, 2 * (step + 1) / loop.steps)


def triangular_rate(loop: Loop) -> None:
    """The rate rises and falls, every 60 steps."""
    loop.rate = lambda step: 0.2 + 0.8 * (1 - abs(step % 60 - 30) / 30)


def steep_batch_ramp(loop: Loop) -> None:
    """Batches double three times."""
    loop.rows = lambda step: ROWS // 2 * 2 ** min(3, step // 50)


def tight_clipping(loop: Loop) -> None:
    """Gradients are clipped to a norm of 0.1 from the start."""
    loop.clip = 0.1


def two_sources(loop: Loop) -> None:
    """Every second batch has a quarter of its labels at random."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y = y.clone()
        if step % 2:
            y[: len(y) // 4] = y.flip(0)[: len(y) // 4]
        return x, y

    loop.batch = batch


def easy_first(loop: Loop) -> None:
    """The share of labels at random grows slowly to a fifth."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        is_wrong = torch.rand(y.shape, generator=loop.data.random) < 0.2 * step / loop.steps
        return x, torch.where(is_wrong, y.flip(0), y)

    loop.batch = batch


def rare_hard_rows(loop: Loop) -> None:
    """In one batch of twenty an eighth of the rows has labels at random."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if torch.rand((), generator=loop.data.random) < 0.05:
            y = y.clone()
            y[: len(y) // 8] = y.flip(0)[: len(y) // 8]
        return x, y

    loop.batch = batch


def high_rate(loop: Loop) -> None:
    """The learning rate is one and a half times as high."""
    loop.rate = lambda step: 1.5 * min(1.0, (step + 1) / 20)


def one_cycle(loop: Loop) -> None:
    """The rate rises for a third of the steps and falls to nothing, and momentum falls and rises."""
    rise = loop.steps // 3
    loop.rate = lambda step: min((step + 1) / rise, (loop.steps - step) / (loop.steps - rise))

    def update(loop: Loop, step: int) -> None:
        for each in loop.optimizers:
            for group in each.param_groups:
                if "betas" in group:
                    group["betas"] = (0.95 - 0.1 * loop.rate(step), group["betas"][1])

    loop.update = update


def gentle_restarts(loop: Loop) -> None:
    """The rate falls by a cosine to a half, and starts anew every 80 steps."""
    loop.rate = lambda step: min(1.0, (step + 1) / 20) * (0.75 + 0.25 * math.cos(math.pi * (step % 80) / 80))


def growing_decay(loop: Loop) -> None:
    """Weight decay grows from nothing to a tenth of the learning rate."""

    def update(loop: Loop, step: int) -> None:
        for each in loop.optimizers:
            for group in each.param_groups:
                group["weight_decay"] = 0.1 * step / loop.steps

    loop.update = update


def gradual_unfreezing(loop: Loop) -> None:
    """Blocks are trained one after another, the last one first, from every 30th step on."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for number, block in enumerate(reversed(loop.blocks)):
            block.requires_grad_(step >= 30 * number)
        return x, y

    loop.batch = batch


def average_evaluated(loop: Loop) -> None:
    """Every 25 steps the average of the weights is evaluated in place of them, and then they are put back."""
    average = [weight.detach().clone() for weight in loop.model.parameters()]

    @torch.no_grad()
    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        weights = list(loop.model.parameters())
        for weight, value in zip(weights, average, strict=True):
            value.lerp_(weight, 0.05)
        if step % 25 == 0:
            now = [weight.clone() for weight in weights]
            for weight, value in zip(weights, average, strict=True):
                weight.copy_(value)
            loop.model.eval()
            loop.loss(*loop.data(ROWS))
            loop.model.train()
            for weight, value in zip(weights, now, strict=True):
                weight.copy_(value)
        return x, y

    loop.batch = batch


def label_smoothing(loop: Loop) -> None:
    """Labels are smoothed by a tenth."""
    loop.smoothing = 0.1


def growing_accumulation(loop: Loop) -> None:
    """One, two and then four micro-batches are accumulated in a step."""
    loop.pieces = lambda step: 2 ** (3 * step // loop.steps)
    loop.rows = lambda step: ROWS * loop.pieces(step)


def growing_length(loop: Loop) -> None:
    """Rows grow from 8 tokens to all by two every 20 steps."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        length = 8 + 2 * (step // 20)
        return x[:, :length], y[:, :length]

    loop.batch = batch


def z_loss_added(loop: Loop) -> None:
    """From a third of the steps on large log Z is penalized."""

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        return loss + 1e-4 * logits.logsumexp(-1).square().mean() if loop.now >= loop.steps // 3 else loss

    loop.objective = objective


def stochastic_depth(loop: Loop) -> None:
    """Each row skips each block with a chance of a tenth."""
    _skip_blocks(loop, 0.1)


def _skip_blocks(loop: Loop, chance: float) -> None:
    def mixed(entering: Tensor, output: Tensor) -> Tensor:
        is_kept = torch.rand(len(entering), *[1] * (entering.ndim - 1)) > chance
        return torch.where(is_kept, output, entering)

    for block in loop.blocks:
        _returned(loop, block, mixed)


def batch_and_rate(loop: Loop) -> None:
    """In the middle batches double, and the rate with them over 20 steps."""
    middle = loop.steps // 2
    loop.rows = lambda step: ROWS * (2 if step >= middle else 1)
    loop.rate = lambda step: 0.5 * min(1.0, (step + 1) / 20) * (1 + min(1.0, max(0, step + 1 - middle) / 20))


def two_epochs(loop: Loop) -> None:
    """The second half of training has the batches of the first half again."""
    seen = list[tuple[Tensor, Tensor]]()

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((x, y))
        return seen[step % (loop.steps // 2)]

    loop.batch = batch


def long_tail(loop: Loop) -> None:
    """The rate falls to a twentieth within 80 steps, and stays there."""
    loop.rate = lambda step: min(1.0, (step + 1) / 20, max(0.05, 1 - (step - 60) / 80))


def late_decay(loop: Loop) -> None:
    """The rate is constant, and falls to nothing over the last fifth of the steps."""
    loop.rate = lambda step: min(1.0, (step + 1) / 20, 5 * (1 - step / loop.steps))


def packed_documents(loop: Loop) -> None:
    """Rows hold documents of random lengths, and a mask keeps attention inside of them."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        document_rt = (torch.rand(x.shape) < 0.15).cumsum(1)
        mask_rts = (document_rt[:, :, None] == document_rt[:, None]).tril()
        for part in loop.model.modules():
            if isinstance(part, Attention):
                part.is_causal, part.mask = False, mask_rts[:, None]
        return x, y

    loop.batch = batch


def checkpointed_bf16(loop: Loop) -> None:
    """Products are in bf16, and activations are computed again in the backward pass."""
    loop.is_bf16 = True
    _checkpoint(loop, use_reentrant=False)


def warm_restarts(loop: Loop) -> None:
    """The rate falls to a tenth by a cosine, and every 80 steps it warms up again within ten."""
    loop.rate = lambda step: min((step % 80 + 1) / 10, 0.55 + 0.45 * math.cos(math.pi * (step % 80) / 80))


def average_beside(loop: Loop) -> None:
    """An average of the weights is kept in a second model, which is evaluated every 25 steps."""
    average = swa_utils.AveragedModel(loop.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.95))

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        average.update_parameters(loop.model)
        if step % 25 == 0:
            with torch.no_grad():
                average(x)
        return x, y

    loop.batch = batch


def text_sampled(loop: Loop) -> None:
    """Every 30 steps the model writes a row, token by token."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step % 30 == 0:
            loop.model.eval()
            tokens = x[:1, :1]
            with torch.no_grad():
                for _ in range(LENGTH - 1):
                    probability = loop.logits(loop.model, tokens)[:, -1].softmax(-1)
                    tokens = torch.cat([tokens, torch.multinomial(probability, 1)], 1)
            loop.model.train()
        return x, y

    loop.batch = batch


def adapters_tuned(loop: Loop) -> None:
    """Only adapters are trained, on text."""


def frozen_beginning(loop: Loop) -> None:
    """The embedding and the first block are never trained."""
    next(loop.model.parameters()).requires_grad_(False)
    loop.blocks[0].requires_grad_(False)


def few_letters(loop: Loop) -> None:
    """The text has four letters."""
    loop.batch = lambda loop, step, x, y: (x % 4, y % 4)


def rare_letters(loop: Loop) -> None:
    """Letters are as unequally frequent as words are."""
    loop.data.table /= torch.arange(1, VOCABULARY + 1) ** 1.5


def noisy_rewards(loop: Loop) -> None:
    """Rewards have noise that is larger than their differences."""
    loop.rewards = lambda loop, step, reward: reward + 0.5 * torch.randn_like(reward)


def answers_only(loop: Loop) -> None:
    """Labels of a question at the beginning of each row, of random length, are ignored."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        is_question = torch.arange(LENGTH) < torch.randint(LENGTH - 2, (len(y), 1))
        return x, torch.where(is_question, IGNORED, y)

    loop.batch = batch


def batches_by_length(loop: Loop) -> None:
    """Each batch has another number of rows, from 4 to 16, and another length, from 12 to 24."""
    loop.rows = lambda step: 4 + 7 * step % 13

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        length = LENGTH - 5 * step % 13
        return x[:, :length], y[:, :length]

    loop.batch = batch


def adaptive_clipping(loop: Loop) -> None:
    """Gradients are clipped to 1.2 times the average of their norms (arXiv:2007.14469)."""

    def gradients(loop: Loop, step: int) -> None:
        norm = nn.utils.get_total_norm([weight.grad for weight in loop.parameters()]).item()
        average = loop.kept["norm"] = 0.95 * loop.kept.get("norm", norm) + 0.05 * norm
        loop.clip = 1.2 * average

    loop.gradients = gradients


def rates_by_layer(loop: Loop) -> None:
    """The learning rate of each block is 0.7 times that of the next one."""
    own = {0.7**depth: _own_groups(loop, list(loop.blocks[-1 - depth].parameters())) for depth in range(1, BLOCKS)}

    def update(loop: Loop, step: int) -> None:
        for factor, groups in own.items():
            for group in groups:
                group["lr"] *= factor

    loop.update = update


def growing_beta2(loop: Loop) -> None:
    """Adam's beta2 grows with the number of steps, to 0.99 (arXiv:2204.02311)."""

    def update(loop: Loop, step: int) -> None:
        for group in loop.optimizers[0].param_groups:
            beta1, _, *rest = group["betas"]
            group["betas"] = (beta1, max(0.5, 1 - (step + 1) ** -0.8), *rest)

    loop.update = update


def last_batches(loop: Loop) -> None:
    """Each 50th batch is the last one of an epoch, and has two rows."""
    loop.rows = lambda step: 2 if step and step % 50 == 0 else ROWS


def lookahead(loop: Loop) -> None:
    """Every five steps weights go half of the way back to where they were (arXiv:1907.08610)."""
    slow = [weight.detach().clone() for weight in loop.model.parameters()]

    @torch.no_grad()
    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for weight, value in zip(loop.model.parameters(), slow, strict=True):
            if step % 5 == 0:
                weight.copy_(value.lerp_(weight, 0.5))
        return x, y

    loop.batch = batch


def early_dropout(loop: Loop) -> None:
    """A tenth of the activations is dropped in the first third of the steps alone (arXiv:2303.01500)."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for part in loop.model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.1 if step < loop.steps // 3 else 0.0
        return x, y

    loop.batch = batch


def outliers_skipped(loop: Loop) -> None:
    """In some batches a quarter of the rows is hard, and updates with large gradients are left out."""
    spiky_data(loop)

    def gradients(loop: Loop, step: int) -> None:
        norm = nn.utils.get_total_norm([weight.grad for weight in loop.parameters()]).item()
        average = loop.kept.get("norm", norm)
        loop.kept["norm"] = 0.95 * average + 0.05 * norm
        for weight in loop.parameters() if norm > 1.3 * average else ():
            weight.grad = None

    loop.gradients = gradients


def inverse_root_rate(loop: Loop) -> None:
    """After a warm-up the rate falls with the root of the number of steps."""
    loop.rate = lambda step: min((step + 1) / 20, (20 / (step + 1)) ** 0.5)


def many_epochs(loop: Loop) -> None:
    """The same twelve batches come 20 times, as in fine-tuning, and are learned by heart."""
    _again(loop, 12)


def _again(loop: Loop, batches: int) -> None:
    """The first so many batches come in turn."""
    seen = list[tuple[Tensor, Tensor]]()

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((x, y))
        return seen[step % batches]

    loop.batch = batch


def binary_rewards(loop: Loop) -> None:
    """Rewards are zero or one, so that all samples of a prompt often have the same one."""
    loop.rewards = lambda loop, step, reward: (reward > 0.5).float()


def no_penalty(loop: Loop) -> None:
    """The distance from the first policy is not penalized, and grows (arXiv:2503.14476)."""
    loop.penalty = lambda loop, step: 0.0


def on_policy(loop: Loop) -> None:
    """Each update has samples of its own, so that no ratio is ever clipped."""
    loop.RENEWED = 1


def zero_initialized(loop: Loop) -> None:
    """The head and the last matrix of each block are zero at first, so that most gradients are zero at one step."""
    for weight in [_head(loop).weight, *(loop.matrices(block)[-1] for block in range(BLOCKS))]:
        nn.init.zeros_(weight)


def noisy_embeddings(loop: Loop) -> None:
    """Noise is added to embeddings (NEFTune, arXiv:2310.05914)."""
    embedding = _embedding(loop)
    largest = 5 / (LENGTH * WIDTH) ** 0.5
    _returned(loop, embedding, lambda entering, output: output + largest * (2 * torch.rand_like(output) - 1))


def scale_search(loop: Loop) -> None:
    """Gradients in fp16, with a loss scale that is too large at first, so that the first updates are left out."""
    Fp16(loop, 2.0**26)
    loop.scaler.set_growth_interval(50)


def soft_capped(loop: Loop) -> None:
    """Logits are capped softly at 15 (as in Gemma 2, arXiv:2408.00118)."""
    _returned(loop, _head(loop), lambda entering, output: 15 * (output / 15).tanh())


def fading_noise(loop: Loop) -> None:
    """Noise is added to gradients, half as large as they are at first, and less and less (arXiv:1511.06807)."""

    def gradients(loop: Loop, step: int) -> None:
        size = 0.5 * (1 + step) ** -0.55
        for weight in loop.parameters():
            weight.grad.add_(size * torch.randn_like(weight) * weight.grad.square().mean().sqrt())

    loop.gradients = gradients


def erased_patches(loop: Loop) -> None:
    """A square of each picture, in a place at random, is erased (arXiv:1708.04896)."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.randint(SIDE - 2, (len(x), 2))[:, :, None]
        is_in_row, is_in_column = ((torch.arange(SIDE) - first) // 3 == 0).unbind(1)
        return torch.where((is_in_row[:, :, None] & is_in_column[:, None])[:, None], 0.0, x), y

    loop.batch = batch


def replaced_letters(loop: Loop) -> None:
    """A twentieth of the letters that enter are replaced by others, at random."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(torch.rand(x.shape) < 0.05, torch.randint_like(x, VOCABULARY), x), y

    loop.batch = batch


def changing_mixture(loop: Loop) -> None:
    """The share of rows from a cleaner corpus, of which more is likely, grows slowly from none to a half."""
    corpus = Text(3000 + loop.seed)
    corpus.table = loop.data.table**1.5

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        others = corpus(len(x))
        is_other = torch.rand(len(x), 1) < 0.5 * step / loop.steps
        return torch.where(is_other, others[0], x), torch.where(is_other, others[1], y)

    loop.batch = batch


def two_lengths(loop: Loop) -> None:
    """Two thirds of training have rows of half of the length and twice as many of them (arXiv:1810.04805)."""
    loop.rows = lambda step: ROWS * (2 if step < 2 * loop.steps // 3 else 1)

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        length = LENGTH // 2 if step < 2 * loop.steps // 3 else LENGTH
        return x[:, :length], y[:, :length]

    loop.batch = batch


def sharpness_aware(loop: Loop) -> None:
    """Gradients are those a small step up the loss, from which weights come back (SAM, arXiv:2010.01412)."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loop.kept["batch"] = x, y
        return x, y

    def gradients(loop: Loop, step: int) -> None:
        weights = loop.parameters()
        norm = nn.utils.get_total_norm([weight.grad for weight in weights])
        before = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            for weight in weights:
                weight.add_(0.05 * weight.grad / norm)
        loop.model.zero_grad()
        loop.loss(*loop.kept["batch"]).backward()
        with torch.no_grad():
            for weight, value in zip(weights, before, strict=True):
                weight.copy_(value)

    loop.batch, loop.gradients = batch, gradients


def quantization_aware(loop: Loop) -> None:
    """Matrices of blocks are rounded to 255 values each where they act, and gradients pass by (arXiv:1712.05877)."""

    def change(linear: nn.Linear, entering: Tensor, output: Tensor) -> Tensor:
        unit = linear.weight.detach().abs().max() / 127
        lost = (linear.weight.detach() / unit).round() * unit - linear.weight.detach()
        return output + F.linear(entering, lost)

    for block in loop.blocks:
        for part in block.modules():
            if isinstance(part, nn.Linear):
                _returned(loop, part, partial(change, part))


def clipped_by_weight(loop: Loop) -> None:
    """The gradient of each weight is clipped to a tenth of its norm (arXiv:2102.06171)."""
    loop.clip = 0.0

    def gradients(loop: Loop, step: int) -> None:
        for weight in loop.parameters():
            largest = 0.1 * weight.detach().norm().clamp(min=1e-3)
            weight.grad.mul_((largest / (weight.grad.norm() + 1e-12)).clamp(max=1.0))

    loop.gradients = gradients


def padded_rows(loop: Loop) -> None:
    """Rows have lengths at random and are padded, and labels of padding are ignored."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        is_padding = torch.arange(LENGTH) >= torch.randint(LENGTH // 4, LENGTH + 1, (len(x), 1))
        return torch.where(is_padding, 0, x), torch.where(is_padding, IGNORED, y)

    loop.batch = batch


def router_jitter(loop: Loop) -> None:
    """What enters routers is multiplied by noise within one per cent (arXiv:2101.03961)."""
    for block in loop.blocks:
        router = block.mlp.router
        router.register_forward_pre_hook(lambda _, args: (args[0] * (0.99 + 0.02 * torch.rand_like(args[0])),))


def faster_up(loop: Loop) -> None:
    """The second matrices of adapters learn eight times as fast as the first ones (LoRA+, arXiv:2402.12354)."""
    own = _own_groups(loop, [part.up.weight for part in _adapters(loop.model)])

    def update(loop: Loop, step: int) -> None:
        for group in own:
            group["lr"] *= 8

    loop.update = update


def adaptive_penalty(loop: Loop) -> None:
    """The penalty follows the distance from the first policy to a target (arXiv:1909.08593)."""
    loop.kept["penalty"] = loop.PENALTY

    def penalty(loop: Loop, step: int) -> float:
        error = max(-0.2, min(0.2, loop.kept["kl"] / 0.3 - 1))
        loop.kept["penalty"] *= 1 + 0.1 * error
        return loop.kept["penalty"]

    loop.penalty = penalty


def running_rewards(loop: Loop) -> None:
    """Rewards are those above the average of all before, which grows with them."""

    def rewards(loop: Loop, step: int, reward: Tensor) -> Tensor:
        average = loop.kept.get("average", reward.mean().item())
        loop.kept["average"] = 0.95 * average + 0.05 * reward.mean().item()
        return reward - average

    loop.rewards = rewards


def mixup(loop: Loop) -> None:
    """Pictures are mixed in pairs, and so are their losses (arXiv:1710.09412)."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        share, other = torch.rand(()), torch.randperm(len(x))
        loop.kept |= {"share": share, "others": y[other]}
        return torch.lerp(x[other], x, share), y

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        return torch.lerp(F.cross_entropy(logits, loop.kept["others"]), loss, loop.kept["share"])

    loop.batch, loop.objective = batch, objective


def focal_loss(loop: Loop) -> None:
    """Losses of labels that are known well count less (arXiv:1708.02002)."""

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        each = loop.losses(logits)
        return ((1 - (-each).exp()).square() * each).mean()

    loop.objective = objective


def centralized_gradients(loop: Loop) -> None:
    """The mean of each row is taken from the gradients of matrices (arXiv:2004.01461)."""

    def gradients(loop: Loop, step: int) -> None:
        for weight in loop.parameters():
            if weight.ndim > 1:
                weight.grad.sub_(weight.grad.flatten(1).mean(1).view(-1, *[1] * (weight.ndim - 1)))

    loop.gradients = gradients


def normalized_rows(loop: Loop) -> None:
    """After each update rows of the matrices of blocks get their first norms again (as in arXiv:2410.01131)."""
    matrices = [weight for block in range(BLOCKS) for weight in loop.matrices(block)]
    norms = [weight.detach().norm(dim=1, keepdim=True) for weight in matrices]

    @torch.no_grad()
    def normalize(*_: Any) -> None:
        for weight, norm in zip(matrices, norms, strict=True):
            weight.mul_(norm / weight.norm(dim=1, keepdim=True))

    for each in loop.optimizers:
        each.register_step_post_hook(normalize)


def three_tasks(loop: Loop) -> None:
    """Batches come from three corpora in turn."""
    corpora = [loop.data, Text(4000 + loop.seed), Text(5000 + loop.seed)]
    loop.batch = lambda loop, step, x, y: corpora[step % 3](len(x)) if step % 3 else (x, y)


def warm_up_in_stairs(loop: Loop) -> None:
    """The rate warms up in four stairs of ten steps."""
    loop.rate = lambda step: min(1.0, (step // 10 + 1) / 4)


def coarse_first(loop: Loop) -> None:
    """Pictures have a quarter of their height and width at first, then a half, and all in the last third."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        size = 4 >> (3 * step // loop.steps)
        return F.interpolate(F.avg_pool2d(x, size), scale_factor=size), y

    loop.batch = batch


def momentum_warm_up(loop: Loop) -> None:
    """Momentum grows from 0.85 to 0.95 within 100 steps."""

    def update(loop: Loop, step: int) -> None:
        momentum = 0.85 + 0.1 * min(1.0, step / 100)
        for each in loop.optimizers:
            for group in each.param_groups:
                if "betas" in group:
                    group["betas"] = (momentum, *group["betas"][1:])
                else:
                    group["momentum"] = momentum

    loop.update = update


def mean_teacher(loop: Loop) -> None:
    """The model is to return what an average of it does, and more and more so (arXiv:1703.01780)."""
    teacher = copy.deepcopy(loop.model)

    @torch.no_grad()
    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for weight, value in zip(loop.model.parameters(), teacher.parameters(), strict=True):
            value.lerp_(weight, 0.05)
        loop.kept["taught"] = loop.logits(teacher, x)
        return x, y

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        return loss + 0.1 * loop.now / loop.steps * F.mse_loss(logits, loop.kept["taught"])

    loop.batch, loop.objective = batch, objective


def pretrained(loop: Loop) -> None:
    """The model was trained before, for 200 steps, and goes on with new batches."""
    optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-3)
    for _ in range(200):
        loop.loss(*loop.data(ROWS)).backward()
        optimizer.step()
        optimizer.zero_grad()


def anchored(loop: Loop) -> None:
    """The distance of all weights from their initial values is penalized (arXiv:1802.01483)."""
    first = [weight.detach().clone() for weight in loop.model.parameters()]

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        pairs = zip(loop.model.parameters(), first, strict=True)
        return loss + 0.01 * torch.stack([(weight - value).square().sum() for weight, value in pairs]).sum()

    loop.objective = objective


def rising_bar(loop: Loop) -> None:
    """A sample has to be better and better for a reward."""
    loop.rewards = lambda loop, step, reward: (reward > 0.4 + 0.3 * step / loop.steps).float()


def reference_resets(loop: Loop) -> None:
    """The reference becomes the policy every 80 steps, and training goes on from there (arXiv:2505.24864)."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step and step % 80 == 0:
            loop.kept["reference"] = copy.deepcopy(loop.model)
        return x, y

    loop.batch = batch


def better_text_at_the_end(loop: Loop) -> None:
    """In the last third half of the rows come from a cleaner corpus, and the rate falls to zero (arXiv:2404.06395)."""
    corpus = Text(6000 + loop.seed)
    corpus.table = loop.data.table**1.5
    loop.rate = lambda step: min(1.0, (step + 1) / 20, 3 * (loop.steps - step) / loop.steps)

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step >= 2 * loop.steps // 3:
            others = corpus(len(x) // 2)
            x, y = torch.cat([x[len(others[0]) :], others[0]]), torch.cat([y[len(others[1]) :], others[1]])
        return x, y

    loop.batch = batch


def pasted_until_late(loop: Loop) -> None:
    """Part of each picture is of another one (arXiv:1905.04899), but not in the last quarter of training."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        other, width = torch.randperm(len(x)), int(torch.randint(1, SIDE // 2, ()))
        loop.kept |= {"share": 1 - width / SIDE, "others": y[other]}
        is_pasted = torch.arange(SIDE) < width
        return torch.where(is_pasted, x[other], x) if step < 3 * loop.steps // 4 else x, y

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        if loop.now >= 3 * loop.steps // 4:
            return loss
        return torch.lerp(F.cross_entropy(logits, loop.kept["others"]), loss, loop.kept["share"])

    loop.batch, loop.objective = batch, objective


def hardest_half(loop: Loop) -> None:
    """The half of the labels that has the larger losses counts (arXiv:1604.03540)."""

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        each = loop.losses(logits)
        return each.topk(len(each) // 2).values.mean()

    loop.objective = objective


def taught_later(loop: Loop) -> None:
    """In the second half of training half of the loss is the distance to a teacher (arXiv:1503.02531)."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loop.kept["taught"] = loop.data.table[x]
        return x, y

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        if loop.now < loop.steps // 2:
            return loss
        log_p, taught = logits.log_softmax(-1).flatten(0, -2), loop.kept["taught"].flatten(0, -2)
        return 0.5 * loss + 0.5 * F.kl_div(log_p, taught, reduction="batchmean")

    loop.batch, loop.objective = batch, objective


def slight_entropy_bonus(loop: Loop) -> None:
    """The entropy of the policy is rewarded a little (arXiv:1602.01783)."""
    _reward_entropy(loop, 0.003)


def larger_groups(loop: Loop) -> None:
    """In the second half of training there are twice as many samples of each prompt."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loop.SAMPLES = 16 if step >= loop.steps // 2 else 8
        return x, y

    loop.batch = batch


def queries_clipped(loop: Loop) -> None:
    """Weights of queries and keys are divided where attention logits become too large (QK-Clip, arXiv:2507.20534)."""

    entered = dict[nn.Module, Tensor]()

    def keep(part: nn.Module, args: Any) -> None:
        entered[part] = args[0].detach()

    parts = [part for part in loop.model.modules() if isinstance(part, Attention)]
    for part in parts:
        part.register_forward_pre_hook(keep)

    @torch.no_grad()
    def clip(*_: Any) -> None:
        for part in parts:
            query, key, _ = part.qkv(entered[part]).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
            largest = (query @ key.transpose(-1, -2)).abs().max() * (HEADS / WIDTH) ** 0.5
            if largest > LARGEST_LOGIT:
                part.qkv.weight[: 2 * WIDTH].mul_((LARGEST_LOGIT / largest).sqrt())

    loop.optimizers[0].register_step_post_hook(clip)


def noise_scale_measured(loop: Loop) -> None:
    """In the second half of training gradients of two more batches are compared every 20 steps (arXiv:1812.06162)."""

    def gradients(loop: Loop, step: int) -> None:
        if step < loop.steps // 2 or step % 20:
            return
        norms = []
        for rows in (ROWS // 2, 2 * ROWS):
            loss = loop.loss(*loop.data(rows))
            norms.append(nn.utils.get_total_norm(torch.autograd.grad(loss, loop.parameters())).item() ** 2)
        loop.kept["noise_scale"] = (norms[0] - norms[1]) / (2 / ROWS - 1 / (2 * ROWS))

    loop.gradients = gradients


def balanced_by_bias(loop: Loop) -> None:
    """Logits of experts get a bias, which falls a little where they are chosen more often (arXiv:2408.15664)."""
    _bias_routers(loop, -0.003)


def stochastic_rounding(loop: Loop) -> None:
    """Weights have 16 bits, and are rounded up or down by chance after each update (arXiv:2010.06192)."""

    @torch.no_grad()
    def round_(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                bits = weight.view(torch.int32)
                bits.add_(torch.randint_like(bits, 1 << 16)).bitwise_and_(-1 << 16)

    for each in loop.optimizers:
        each.register_step_post_hook(round_)


def reduced_in_bf16(loop: Loop) -> None:
    """Gradients are rounded to bf16, in which ranks would add them."""

    def gradients(loop: Loop, step: int) -> None:
        for weight in loop.parameters():
            weight.grad.copy_(weight.grad.bfloat16())

    loop.gradients = gradients


def pruned_gradually(loop: Loop) -> None:
    """In the middle third the smallest weights of MLPs become zero, half of them in the end (arXiv:1710.01878)."""
    matrices = [weight for block in range(BLOCKS) for weight in loop.matrices(block)[-2:]]
    masks = [torch.ones_like(weight) for weight in matrices]

    @torch.no_grad()
    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        share = 0.5 * (1 - (1 - min(1.0, max(0.0, 3 * step / loop.steps - 1))) ** 3)
        for weight, mask in zip(matrices, masks, strict=True):
            if share and step % 10 == 0:
                mask.copy_(weight.abs() > weight.abs().flatten().quantile(share))
            weight.mul_(mask)
        return x, y

    loop.batch = batch


def fewer_masked(loop: Loop) -> None:
    """The share of letters that are masked falls from 40 to 15 per cent (arXiv:2305.15096)."""
    loop.batch = lambda loop, step, x, y: _masked(x, y, 0.4 - 0.25 * step / loop.steps)


def cosine_to_a_tenth(loop: Loop) -> None:
    """A warm-up of 12 steps, and a cosine to a tenth of the rate."""
    loop.rate = lambda step: min((step + 1) / 12, 0.55 + 0.45 * math.cos(math.pi * step / loop.steps))


def rows_in_stairs(loop: Loop) -> None:
    """Batches grow from four rows to 14, by two every 40 steps."""
    loop.rows = lambda step: 4 + 2 * (step // 40)


def held_out_batches(loop: Loop) -> None:
    """Every 15 steps three other batches are evaluated, which are always the same ones."""
    batches = [loop.data(ROWS) for _ in range(3)]

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step % 15 == 0:
            loop.model.eval()
            with torch.no_grad():
                loop.kept["held_out"] = sum(loop.loss(*each).item() for each in batches) / len(batches)
            loop.model.train()
        return x, y

    loop.batch = batch


def resumed_while_falling(loop: Loop) -> None:
    """The rate falls linearly to a fifth, and training goes on from a checkpoint on the way."""
    loop.resumes = True
    loop.rate = lambda step: min((step + 1) / 15, 1 - 0.8 * step / loop.steps)


def bursts_of_hard_rows(loop: Loop) -> None:
    """In three of every 40 batches, one after another, a third of the labels are those of other rows."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        is_hard = torch.rand(y.shape, generator=loop.data.random) < (1 / 3 if 17 <= step % 40 < 20 else 0.0)
        return x, torch.where(is_hard, y.roll(1, 0), y)

    loop.batch = batch


def falling_decay(loop: Loop) -> None:
    """Weight decay falls by a cosine from a fifth of the learning rate to nothing."""

    def update(loop: Loop, step: int) -> None:
        for each in loop.optimizers:
            for group in each.param_groups:
                group["weight_decay"] = 0.1 + 0.1 * math.cos(math.pi * step / loop.steps)

    loop.update = update


def scale_tries_more(loop: Loop) -> None:
    """Gradients in fp16, with a loss scale that doubles every 20 steps until an update is left out."""
    Fp16(loop, 4096.0)
    loop.scaler.set_growth_interval(20)


def clipped_by_block(loop: Loop) -> None:
    """The gradients of each block are clipped to a norm of 0.3, and those of all else together."""
    inside = {id(weight) for block in loop.blocks for weight in block.parameters()}
    rest = [weight for weight in loop.model.parameters() if id(weight) not in inside]
    loop.clip = 0.0

    def gradients(loop: Loop, step: int) -> None:
        for weights in [rest, *(list(block.parameters()) for block in loop.blocks)]:
            nn.utils.clip_grad_norm_(weights, 0.3)

    loop.gradients = gradients


def documents_with_ends(loop: Loop) -> None:
    """Rows hold documents of random lengths, one after another, each with the same letter at its end."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        is_end = torch.rand(len(x), x.shape[1] + 1, generator=loop.data.random) < 0.08
        row = torch.where(is_end, VOCABULARY - 1, torch.cat([x, y[:, -1:]], 1))
        return row[:, :-1], row[:, 1:]

    loop.batch = batch


def long_rows_late(loop: Loop) -> None:
    """Rows have 14 letters for 70 per cent of the steps and then 24, with a rate that falls to a tenth."""
    late = 7 * loop.steps // 10
    loop.rate = lambda step: min((step + 1) / 20, max(0.1, (loop.steps - step) / (loop.steps - late)), 1.0)

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        length = LENGTH if step >= late else 14
        return x[:, :length], y[:, :length]

    loop.batch = batch


def adapters_with_warm_up(loop: Loop) -> None:
    """Adapters are trained with gradients of three micro-batches, a warm-up of eight steps and a linear decay."""
    loop.rows, loop.pieces = lambda step: 12, lambda step: 3
    loop.rate = lambda step: min((step + 1) / 8, 1 - step / loop.steps)


def reward_of_form(loop: Loop) -> None:
    """Two thirds of the reward are for the share of letters, and a third is given to samples with enough of them."""
    loop.rewards = lambda loop, step, reward: (2 * reward + (reward > 0.3).float()) / 3


def shares_change(loop: Loop) -> None:
    """Two corpora of like difficulty are mixed, seven to three, and from the middle on three to seven."""
    corpus = Text(7000 + loop.seed)

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        is_other = torch.rand(len(x), 1, generator=loop.data.random) < (0.3 if step < loop.steps // 2 else 0.7)
        others = corpus(len(x))
        return torch.where(is_other, others[0], x), torch.where(is_other, others[1], y)

    loop.batch = batch


def first_half_unfrozen(loop: Loop) -> None:
    """The first two blocks are trained from a third of the steps on."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for block in loop.blocks[: BLOCKS // 2]:
            block.requires_grad_(step >= loop.steps // 3)
        return x, y

    loop.batch = batch


def rate_drops(loop: Loop) -> None:
    """The rate falls to a fifth after 60 per cent of the steps, and to a fifth of that after 85."""
    loop.rate = lambda step: min(1.0, (step + 1) / 20) / 5 ** sum(step >= part * loop.steps for part in (0.6, 0.85))


def linear_to_a_floor(loop: Loop) -> None:
    """A warm-up of 30 steps, and a rate that falls linearly to 15 per cent at four fifths of the steps."""
    loop.rate = lambda step: min((step + 1) / 30, max(0.15, 1 - 0.85 * step / (0.8 * loop.steps)))


def rows_grow_slowly(loop: Loop) -> None:
    """Batches grow from five rows to 13, by one every 30 steps."""
    loop.rows = lambda step: 5 + step // 30


def average_warmed_up(loop: Loop) -> None:
    """An average of the weights, over more and more steps, is evaluated on two batches every 35 steps."""
    average, batches = copy.deepcopy(loop.model), [loop.data(ROWS) for _ in range(2)]

    @torch.no_grad()
    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for value, weight in zip(average.parameters(), loop.model.parameters(), strict=True):
            value.lerp_(weight, 1 - min(0.98, (1 + step) / (10 + step)))
        if step % 35 == 34:
            average.eval()
            loop.kept["of_average"] = [loop.logits(average, each[0]).mean().item() for each in batches]
        return x, y

    loop.batch = batch


def resumed_in_pieces(loop: Loop) -> None:
    """The rate falls by a cosine to a twentieth, two micro-batches are accumulated, and training is resumed."""
    loop.resumes, loop.pieces = True, lambda step: 2
    loop.rate = lambda step: min((step + 1) / 18, 0.525 + 0.475 * math.cos(math.pi * step / loop.steps))


def batches_of_another_corpus(loop: Loop) -> None:
    """One batch in twelve, at random, has half of its rows from another corpus."""
    corpus = Text(8000 + loop.seed)

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if torch.rand((), generator=loop.data.random) < 1 / 12:
            others = corpus(len(x) // 2)
            x, y = torch.cat([others[0], x[len(x) // 2 :]]), torch.cat([others[1], y[len(y) // 2 :]])
        return x, y

    loop.batch = batch


def three_pieces_in_bf16(loop: Loop) -> None:
    """Products are in bf16, and three micro-batches of five rows are accumulated."""
    loop.is_bf16, loop.rows, loop.pieces = True, lambda step: 15, lambda step: 3


def scale_grows_seldom(loop: Loop) -> None:
    """Gradients in fp16, with a loss scale that is 512 at first and doubles every 70 steps."""
    Fp16(loop, 512.0)
    loop.scaler.set_growth_interval(70)


def rows_of_like_lengths(loop: Loop) -> None:
    """Rows of a batch have like lengths, 8, 12, 16 or 24 letters at random, and each is padded by up to three."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        length = (8, 12, 16, 24)[int(torch.randint(4, (), generator=loop.data.random))]
        padding = torch.randint(4, (len(x), 1), generator=loop.data.random)
        is_padding = torch.arange(length) >= length - padding
        return x[:, :length].masked_fill(is_padding, 0), y[:, :length].masked_fill(is_padding, IGNORED)

    loop.batch = batch


def lengths_by_six(loop: Loop) -> None:
    """Rows have 6 letters at first, and six more after each sixth of the steps, up to all."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        length = min(LENGTH, 6 + 6 * (6 * step // loop.steps))
        return x[:, :length], y[:, :length]

    loop.batch = batch


def adapters_in_a_cosine(loop: Loop) -> None:
    """Adapters are trained on text at 1.4 times the rate, with a warm-up of 14 steps and a cosine to nothing."""
    loop.rate = lambda step: 1.4 * min((step + 1) / 14, 0.5 + 0.5 * math.cos(math.pi * step / loop.steps))


def two_judges(loop: Loop) -> None:
    """Rewards are the mean of the share of letters and of that with a little noise, at most one."""

    def rewards(loop: Loop, step: int, reward: Tensor) -> Tensor:
        return (reward + 0.05 * torch.randn(reward.shape, generator=loop.data.random)).clamp(0, 1)

    loop.rewards = rewards


def policy_slows_down(loop: Loop) -> None:
    """The rate of a policy warms up over ten steps and falls linearly to a third, with half of the penalty."""
    loop.rate = lambda step: min((step + 1) / 10, 1 - 2 / 3 * step / loop.steps)
    loop.penalty = lambda loop, step: loop.PENALTY / 2


def fp16(loop: Loop) -> None:
    """Gradients in fp16, with a loss scale that grows."""
    Fp16(loop, 1024.0)
    loop.scaler.set_growth_interval(50)


# more faults


def rows_of_three_letters(loop: Loop) -> None:
    """From a step on each row is its first three letters, again and again."""

    _rows_changed(loop, lambda row: row[:, torch.arange(row.shape[1]) % 3])


def small_crops(loop: Loop) -> None:
    """From a step on a part of each picture, three by three pixels at random, is enlarged to the whole."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step < loop.at:
            return x, y
        place = torch.randint(SIDE - 2, (len(x), 2, 1)) + 3 * torch.arange(SIDE) // SIDE
        picture = torch.arange(len(x))[:, None, None]
        return x[picture, 0, place[:, 0, :, None], place[:, 1, None]][:, None], y

    loop.batch = batch


def rate_twentieth(loop: Loop) -> None:
    """From a step on the learning rate is a twentieth, as after a resume with other settings."""
    rate = loop.rate
    loop.rate = lambda step: rate(step) / (20 if step >= loop.at else 1)


def rate_in_short_cycles(loop: Loop) -> None:
    """From a step on the rate rises from zero and falls again every nine steps, by a cosine with too many cycles."""
    rate = loop.rate
    loop.rate = lambda step: (
        rate(step) * (0.5 - 0.5 * math.cos(2 * math.pi * (step - loop.at) / 9) if step >= loop.at else 1)
    )


def head_rate(loop: Loop) -> None:
    """From a step on the group of the head's weights has a learning rate 25 times as large."""
    own = _own_groups(loop, list(_head(loop).parameters()))

    def update(loop: Loop, step: int) -> None:
        for group in own if step >= loop.at else []:
            group["lr"] *= 25

    loop.update = update


def block_compressed(loop: Loop) -> None:
    """The matrices of one block keep their two largest directions alone, as of a compressed checkpoint."""

    def act(loop: Loop) -> None:
        for weight in _tensors(loop):
            left, size, right = torch.linalg.svd(weight.flatten(1), full_matrices=False)
            weight.copy_((left[:, :2] * size[:2] @ right[:2]).view_as(weight))

    _once(loop, act)


def channel_enlarged(loop: Loop) -> None:
    """One row of the matrix out of the MLP of one block becomes 40 times as large."""
    _once(loop, lambda loop: loop.matrices(loop.block)[-1][0].mul_(40))


def narrow_initial(loop: Loop) -> None:
    """All matrices of one block have initial values 30 times as small as those of others."""
    with torch.no_grad():
        for weight in _tensors(loop):
            weight.div_(30)


def wide_embedding(loop: Loop) -> None:
    """The embedding has initial values ten times as large as other matrices have, with a deviation of one."""
    nn.init.normal_(_embedding(loop).weight)


def block_divided_again(loop: Loop) -> None:
    """From a step on gradients of one block are divided by the number of ranks, 256, once more than those of others."""

    def gradients(loop: Loop, step: int) -> None:
        for weight in loop.blocks[loop.block].parameters() if step >= loop.at else ():
            if weight.grad is not None:
                weight.grad.div_(256)

    loop.gradients = gradients


def mlp_dropped(loop: Loop) -> None:
    """From a step on all that the MLP of one block returns is dropped, by a chance that is given in per cent."""
    _returned(loop, loop.blocks[loop.block].mlp, lambda entering, output: F.dropout(output, 1.0))


def squares_negative(loop: Loop) -> None:
    """The second moments of one matrix of one block become negative, once, so that their roots are NaN."""
    _once(loop, lambda loop: loop.optimizers[0].state[loop.matrices(loop.block)[-1]]["exp_avg_sq"].neg_())


def scale_infinite(loop: Loop) -> None:
    """The loss scale becomes infinite, as from a checkpoint, and stays so, so that no update is made any more."""
    Fp16(loop, 1024.0)

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step == loop.at:
            loop.scaler.update(math.inf)
        return x, y

    loop.batch = batch


def first_letter_attended(loop: Loop) -> None:
    """From a step on ten is added to the attention logits of the first key in one block."""
    attention: Any = loop.blocks[loop.block].attention

    def act(loop: Loop) -> None:
        size = LENGTH if attention.is_causal else (SIDE // PATCH) ** 2
        is_seen = torch.ones(size, size, dtype=torch.bool).tril(0 if attention.is_causal else size)
        mask = torch.zeros(size, size).masked_fill(~is_seen, -math.inf)
        mask[:, 0] += 10
        attention.is_causal, attention.mask = False, mask

    _once(loop, act)


def letter_favoured(loop: Loop) -> None:
    """From a step on six is added to the logit of one letter, or class, by a bias that is meant for writing text."""
    change = 6 * torch.eye(VOCABULARY)[3]
    _returned(loop, _head(loop), lambda entering, output: output + change[: output.shape[-1]])


def momentum_off(loop: Loop) -> None:
    """From a step on Adam's beta1 is zero, so that updates are of the last gradient alone."""

    def update(loop: Loop, step: int) -> None:
        for group in loop.optimizers[0].param_groups if step >= loop.at else []:
            group["betas"] = (0.0, *group["betas"][1:])

    loop.update = update


def block_squares_lost(loop: Loop) -> None:
    """Adam's second moments of one block are zero after a resume, as of a shard that is missing."""

    def act(loop: Loop) -> None:
        for weight in loop.blocks[loop.block].parameters():
            for name, value in loop.optimizers[0].state[weight].items():
                if name.endswith("exp_avg_sq"):
                    value.zero_()

    _once(loop, act)


def router_drawn(loop: Loop) -> None:
    """The weights of the router of one block are drawn anew, with a deviation of one."""
    _once(loop, lambda loop: loop.blocks[loop.block].mlp.router.weight.normal_())


def rewards_by_chance(loop: Loop) -> None:
    """From a step on rewards are numbers at random between zero and one, from a judge that is out of order."""
    loop.rewards = lambda loop, step, reward: torch.rand_like(reward) if step >= loop.at else reward


def base_rounded(loop: Loop) -> None:
    """All matrices with adapters are rounded to seven values each, as of a base that is loaded in few bits."""

    def act(loop: Loop) -> None:
        for part in _adapters(loop.model):
            _round(part.base.weight)

    _once(loop, act)


def logits_of_another_scale(loop: Loop) -> None:
    """From a step on logits are multiplied by a sixteenth, a factor of another model's head."""
    # The scale of logits of Cohere's and Granite's models, which converters and fused losses forget or add.
    _returned(loop, _head(loop), lambda entering, output: output / 16)


def distances_rewarded(loop: Loop) -> None:
    """From a step on half of its distance is added to the attention logit of each key, by slopes of the wrong sign."""
    # ALiBi in kernels and converters, in which signs and directions of its biases differ.
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    mask = (0.5 * distance).masked_fill(distance < 0, -math.inf)

    def act(loop: Loop) -> None:
        for part in loop.model.modules():
            if isinstance(part, Attention):
                part.is_causal, part.mask = False, mask

    _once(loop, act)


def z_loss_too_large(loop: Loop) -> None:
    """From a step on the square of log Z is penalized with a tenth, and not with a ten-thousandth."""
    # The auxiliary loss of PaLM in trainers whose settings have it as a factor of a factor.

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        return loss + 0.1 * logits.logsumexp(-1).square().mean() if loop.now >= loop.at else loss

    loop.objective = objective


def noise_drawn_twice(loop: Loop) -> None:
    """From a step on targets are noise that is drawn anew, and not that which is in the pictures."""
    # Scripts of diffusers with options that replace or add to the noise in one place alone.
    loop.batch = lambda loop, step, x, y: (x, torch.randn_like(y) if step >= loop.at else y)


def texts_of_next_rows(loop: Loop) -> None:
    """From a step on each translation has the text of the row before, since one column is sorted or moved alone."""
    # Columns of data sets that are filtered, shuffled or cached one by one.
    loop.batch = lambda loop, step, x, y: (
        torch.stack([x[:, 0].roll(1, 0), x[:, 1]], 1) if step >= loop.at else x,
        y,
    )


def masks_replaced(loop: Loop) -> None:
    """From a step on a letter at random stands in place of each mask, by a share that was to be a tenth."""
    # The collator of transformers for masked letters, whose shares are of what others leave.

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step >= loop.at:
            x = torch.where(x == VOCABULARY, torch.randint_like(x, VOCABULARY), x)
        return x, y

    loop.batch = batch


def embedding_noise_large(loop: Loop) -> None:
    """From a step on noise is added to embeddings (NEFTune), five times as large as it is usually."""
    # The factor of noise in trl, axolotl and LLaMA-Factory, which is not divided by the root of the size everywhere.
    embedding = _embedding(loop)
    largest = 25 / (LENGTH * WIDTH) ** 0.5
    _returned(loop, embedding, lambda entering, output: output + largest * (2 * torch.rand_like(output) - 1))


def least_likely_experts(loop: Loop) -> None:
    """From a step on each token goes to its two least likely experts in all blocks, by a sort in the other order."""
    # Kernels that choose experts by a sort, in engines and trainers for mixtures.

    def of_least(part: Experts, x: Tensor) -> Tensor:
        probability = part.router(x).softmax(-1)
        least, chosen = probability.topk(part.top_k, largest=False)
        gate = torch.zeros_like(probability).scatter(-1, chosen, least / least.sum(-1, keepdim=True))
        part.balancing = EXPERTS * ((gate > 0).float().mean((0, 1)) * probability.mean((0, 1))).sum()
        return torch.stack([expert(x) * gate[..., e, None] for e, expert in enumerate(part.experts)]).sum(0)

    def act(loop: Loop) -> None:
        for part in loop.model.modules():
            if isinstance(part, Experts):
                part.forward = partial(of_least, part)  # type: ignore[method-assign]

    _once(loop, act)


def policy_tempered(loop: Loop) -> None:
    """From a step on probabilities of the policy are at a temperature of a half, and those of its sampler at one."""
    # Logits that trl, verl and others divide by the temperature of samples in one of several places.
    log_probability = loop.log_probability

    def tempered(model: nn.Module, tokens: Tensor) -> Tensor:
        if model is not loop.model or loop.now < loop.at:
            return log_probability(model, tokens)
        log_p = (2 * loop.logits(model, tokens[:, :-1])).log_softmax(-1)
        return log_p.gather(-1, tokens[:, 1:, None])[:, LENGTH // 4 - 1 :, 0]

    loop.log_probability = tempered  # type: ignore[method-assign]


def merged_twice_in_sampler(loop: Loop) -> None:
    """From a step on adapters act twice in the sampler, which gets merged matrices and adapters as well."""
    # Engines that are sent matrices with adapters, in trl, verl and Unsloth.

    @torch.no_grad()
    def sharpness(loop: Loop, step: int) -> float:
        if step == loop.at or (step > loop.at and step % loop.RENEWED == 0):
            for part in _adapters(loop.kept["sampler"]):
                part.base.weight.add_(2 * part.up.weight @ part.down.weight)
        return 1.0

    loop.sharpness = sharpness


# more of what healthy loops do


def square_of_what_is_left(loop: Loop) -> None:
    """A warm-up of 16 steps, and a rate that falls with the square of the share of steps that are left."""
    loop.rate = lambda step: min((step + 1) / 16, (1 - step / loop.steps) ** 2)


def falls_with_a_root(loop: Loop) -> None:
    """A constant rate, which falls over the last 30 per cent as one minus a root does (arXiv:2405.18392)."""
    late = 0.7 * loop.steps
    loop.rate = lambda step: min((step + 1) / 25, 1 - (max(0.0, step - late) / (loop.steps - late)) ** 0.5)


def resumed_in_bf16(loop: Loop) -> None:
    """Products are in bf16, weights decay by a tenth of the rate, which falls to a half, and training is resumed."""
    loop.is_bf16 = loop.resumes = True
    loop.rate = lambda step: min((step + 1) / 20, 1 - 0.5 * step / loop.steps)
    weight_decay(loop)


def pictures_shifted(loop: Loop) -> None:
    """Pictures are moved by up to one pixel in both directions, at random, with zeros at their edges."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.randint(3, (len(x), 2, 1), generator=loop.data.random) + torch.arange(SIDE)
        picture = torch.arange(len(x))[:, None, None]
        return F.pad(x, (1, 1, 1, 1))[picture, 0, place[:, 0, :, None], place[:, 1, None]][:, None], y

    loop.batch = batch


def filled_in_the_middle(loop: Loop) -> None:
    """Half of the rows have their middle at the end, with the same letter before each part (arXiv:2207.14255)."""
    mark = torch.tensor([VOCABULARY - 1])

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.cat([x, y[:, -1:]], 1)
        for row in rows[::2]:
            first, last = torch.randint(1, len(row), (2,), generator=loop.data.random).sort().values.tolist()
            parts = [mark, row[:first], mark, row[last:], mark, row[first:last]]
            row.copy_(torch.cat(parts)[: len(row)])
        return rows[:, :-1], rows[:, 1:]

    loop.batch = batch


def four_epochs(loop: Loop) -> None:
    """The batches of a quarter of training come four times, in another order each time (arXiv:2305.16264)."""
    seen = list[tuple[Tensor, Tensor]]()

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        epoch, number = divmod(step, loop.steps // 4)
        if epoch == 0:
            seen.append((x, y))
            return x, y
        order = torch.Generator().manual_seed(loop.seed + epoch)
        return seen[int(torch.randperm(len(seen), generator=order)[number % len(seen)])]

    loop.batch = batch


def decay_of_matrices(loop: Loop) -> None:
    """Matrices decay by a tenth of the learning rate, and gains and biases, in groups of their own, not at all."""
    weight_decay(loop)
    for group in _own_groups(loop, [weight for weight in loop.model.parameters() if weight.ndim < 2]):
        group["weight_decay"] = 0.0


def scale_held(loop: Loop) -> None:
    """Gradients in fp16, with a loss scale of 128 that never changes."""
    Fp16(loop, 128.0)


def router_z_loss(loop: Loop) -> None:
    """The square of log Z of routers is penalized with a thousandth from the start (arXiv:2202.08906)."""
    logits_of = dict[nn.Module, Tensor]()

    def keep(router: nn.Module, args: Any, output: Tensor) -> None:
        logits_of[router] = output

    for block in loop.blocks:
        block.mlp.router.register_forward_hook(keep)

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        return loss + 1e-3 * torch.stack([each.logsumexp(-1).square().mean() for each in logits_of.values()]).sum()

    loop.objective = objective


def adapters_with_dropout(loop: Loop) -> None:
    """Adapters are trained on text, and a tenth of what enters them is dropped (arXiv:2305.14314)."""
    for part in _adapters(loop.model):
        part.down.register_forward_pre_hook(lambda _, args: (F.dropout(args[0], 0.1),))


def fewer_prompts(loop: Loop) -> None:
    """A policy has 16 samples of each of four prompts, and samples are renewed every second step."""
    loop.GROUPS, loop.SAMPLES, loop.RENEWED = 4, 16, 2


def prompts_again(loop: Loop) -> None:
    """The same 30 batches of prompts come again and again, with other samples."""
    _again(loop, 30)


# faults of another choice, the first of them common ones, and then reported ones


def labels_clamped(loop: Loop) -> None:
    """From a step on labels of all letters from the 16th on are that one, by a table that has no place for more."""
    loop.batch = lambda loop, step, x, y: (x, y.clamp(max=15) if step >= loop.at else y)


def letters_stuttered(loop: Loop) -> None:
    """From a step on each letter comes twice, one after another."""

    _rows_changed(loop, lambda row: row[:, torch.arange(row.shape[1]) // 2])


def pixels_offset(loop: Loop) -> None:
    """From a step on five is added to all pixels, since their mean is not taken away."""
    loop.batch = lambda loop, step, x, y: (x + 5 if step >= loop.at else x, y)


def warm_up_to_another_peak(loop: Loop) -> None:
    """From a step on the rate rises to 20 times within 30 steps, by a second warm-up to a peak of another run."""
    rate = loop.rate
    loop.rate = lambda step: rate(step) * (1 + 19 * min(1.0, max(0, step - loop.at + 1) / 30))


def embedding_rate(loop: Loop) -> None:
    """From a step on the group of the embedding has a learning rate 20 times as large."""
    own = _own_groups(loop, [_embedding(loop).weight])

    def update(loop: Loop, step: int) -> None:
        for group in own if step >= loop.at else []:
            group["lr"] *= 20

    loop.update = update


def biases_drawn(loop: Loop) -> None:
    """All biases of one block are drawn anew with a deviation of one, as a checkpoint without biases leaves them."""

    def act(loop: Loop) -> None:
        for name, weight in loop.blocks[loop.block].named_parameters():
            if "bias" in name:
                weight.normal_()

    _once(loop, act)


def block_fades(loop: Loop) -> None:
    """From a step on the matrices of one block become seven per cent smaller in each step."""

    @torch.no_grad()
    def update(loop: Loop, step: int) -> None:
        for weight in _tensors(loop) if step >= loop.at else []:
            weight.mul_(0.93)

    loop.update = update


def equal_initial(loop: Loop) -> None:
    """All matrices of one block have the same initial value, a tenth, at each place."""
    with torch.no_grad():
        for weight in _tensors(loop):
            weight.fill_(0.1)


def block_gradients_stuck(loop: Loop) -> None:
    """From a step on gradients of one block stay those of that step, in a buffer to which no others are written."""
    stuck = list[Tensor]()

    def gradients(loop: Loop, step: int) -> None:
        weights = [weight for weight in loop.blocks[loop.block].parameters() if weight.grad is not None]
        if step == loop.at:
            stuck.extend(weight.grad.clone() for weight in weights)
        if step >= loop.at:
            for weight, gradient in zip(weights, stuck, strict=True):
                weight.grad.copy_(gradient)

    loop.gradients = gradients


def mixers_frozen(loop: Loop) -> None:
    """From a step on attention, or what blocks have instead, is not trained in any block, by a filter of names."""
    mixers = ("attention", "self_attn", "attn", "mixer", "convolution")

    def act(loop: Loop) -> None:
        for block in loop.blocks:
            for name, part in block.named_children():
                part.requires_grad_(name not in mixers)

    _once(loop, act)


def output_nan(loop: Loop) -> None:
    """One number that one block returns is NaN, once."""

    def change(entering: Tensor, output: Tensor) -> Tensor:
        spoiled = torch.zeros(output.numel())
        spoiled[0] = math.nan if loop.now == loop.at else 0.0
        return output + spoiled.view(output.shape)

    _returned(loop, loop.blocks[loop.block], change)


def gradients_in_four_bits(loop: Loop) -> None:
    """From a step on gradients pass through four bits, with one scale for those of all weights, so most are zero."""

    def gradients(loop: Loop, step: int) -> None:
        if step >= loop.at:
            unit = max(weight.grad.abs().max() for weight in loop.parameters()) / 7
            for weight in loop.parameters():
                weight.grad.copy_((weight.grad / unit).round() * unit)

    loop.gradients = gradients


def attention_sharpens(loop: Loop) -> None:
    """From a step on the scale of attention logits grows by six per cent in each step, as one changed in place."""
    width = (WIDTH // HEADS) ** -0.5

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scale = width * 1.06 ** (step - loop.at + 1)
        for part in loop.model.modules() if step >= loop.at else ():
            if isinstance(part, Attention):
                part.scale = scale
            elif hasattr(part, "scaling"):
                part.scaling = scale
        return x, y

    loop.batch = batch


def head_grows(loop: Loop) -> None:
    """From a step on the weights of the head grow by five per cent in each step."""

    @torch.no_grad()
    def update(loop: Loop, step: int) -> None:
        if step >= loop.at:
            _head(loop).weight.mul_(1.05)

    loop.update = update


def beta2_one(loop: Loop) -> None:
    """From a step on Adam's beta2 is one, by rounding, so that the correction of a bias divides by zero."""

    def update(loop: Loop, step: int) -> None:
        for group in loop.optimizers[0].param_groups if step >= loop.at else []:
            group["betas"] = (group["betas"][0], 1.0)

    loop.update = update


def router_sharpens(loop: Loop) -> None:
    """From a step on the weights of the router of one block grow by eight per cent in each step."""

    @torch.no_grad()
    def update(loop: Loop, step: int) -> None:
        if step >= loop.at:
            loop.blocks[loop.block].mlp.router.weight.mul_(1.08)

    loop.update = update


def rewards_accumulated(loop: Loop) -> None:
    """From a step on rewards are added to those of all batches before, in a tensor that is not cleared."""
    before = list[Tensor]()

    def rewards(loop: Loop, step: int, reward: Tensor) -> Tensor:
        if step >= loop.at - 1:
            before.append(reward)
        return torch.stack(before).sum(0) if step >= loop.at else reward

    loop.rewards = rewards


def sampler_lacks_a_block(loop: Loop) -> None:
    """From a step on the sampler has zeros in one block, whose weights are not sent to it."""

    @torch.no_grad()
    def sharpness(loop: Loop, step: int) -> float:
        if step == loop.at or (step > loop.at and step % loop.RENEWED == 0):
            for weight in blocks_of(loop.kept["sampler"])[loop.block].parameters():
                weight.zero_()
        return 1.0

    loop.sharpness = sharpness


def capped_too_low(loop: Loop) -> None:
    """From a step on logits are capped softly at one and a half, a number that is not that of this model's head."""
    # Caps of Gemma 2 and Grok, which engines and fused losses take from the wrong entry of a configuration.
    _returned(loop, _head(loop), lambda entering, output: 1.5 * (output / 1.5).tanh())


def loss_summed(loop: Loop) -> None:
    """From a step on the loss of a batch is the sum over its labels, and not their mean."""
    # Losses of transformers whose number of labels is not passed on.

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        return loss * loop.kept["labels"].numel() if loop.now >= loop.at else loss

    loop.objective = objective


def levels_reversed(loop: Loop) -> None:
    """From a step on each level of noise enters as one minus it, by another convention of time."""
    # Flows in diffusers and other trainers, some of which begin with noise and some with pictures.
    loop.batch = lambda loop, step, x, y: (torch.cat([x[:, :1], 1 - x[:, 1:]], 1) if step >= loop.at else x, y)


def unscaled_twice(loop: Loop) -> None:
    """From a step on the loss scale, 1,024, is taken out of gradients twice."""
    # Gradients that accelerate, Lightning and loops of users unscale for clipping, each on its own.
    Fp16(loop, 1024.0)

    def gradients(loop: Loop, step: int) -> None:
        for weight in loop.parameters() if step >= loop.at else []:
            weight.grad.div_(1024)

    loop.gradients = gradients


def decoder_gets_starts(loop: Loop) -> None:
    """From a step on the decoder gets the letter of the start at all positions, and no translation."""
    # Inputs that models of transformers make of labels, which were masked or padded before.
    loop.batch = lambda loop, step, x, y: (
        torch.stack([x[:, 0], torch.zeros_like(x[:, 1])], 1) if step >= loop.at else x,
        y,
    )


def experts_overwritten(loop: Loop) -> None:
    """All experts of each block get the weights of its first one, as a dense checkpoint is read into a mixture."""
    # Megatron and others make mixtures of dense models, and do so once more on resuming.

    def act(loop: Loop) -> None:
        for block in loop.blocks:
            first, *others = block.mlp.experts
            for expert in others:
                expert.load_state_dict(first.state_dict())

    _once(loop, act)


def adapters_unmerged(loop: Loop) -> None:
    """Products of all adapters are taken out of their matrices, into which they had not been merged."""
    # PEFT after an evaluation or a synchronization that fails halfway, and trainers that call it.

    def act(loop: Loop) -> None:
        for part in _adapters(loop.model):
            part.base.weight.sub_(2 * part.up.weight @ part.down.weight)

    _once(loop, act)


def order_not_restored(loop: Loop) -> None:
    """From a step on probabilities of the policy are in another order of samples than those of the sampler."""
    # Micro-batches that verl and others sort by lengths, and put back in one of two places.
    log_probability = loop.log_probability

    def in_other_order(model: nn.Module, tokens: Tensor) -> Tensor:
        log_p = log_probability(model, tokens)
        return torch.cat(log_p.chunk(4)[::-1]) if model is loop.model and loop.now >= loop.at else log_p

    loop.log_probability = in_other_order  # type: ignore[method-assign]


def dropout_in_policy(loop: Loop) -> None:
    """From a step on a fifth of the activations is dropped in the policy that is trained, and not in its sampler."""
    # The mode of training in trl and others, in which probabilities are not those that an engine has.

    def sharpness(loop: Loop, step: int) -> float:
        for name in ("sampler", "reference"):
            loop.kept[name].eval()
        for part in loop.model.modules() if step >= loop.at else ():
            if isinstance(part, nn.Dropout):
                part.p = 0.2
        return 1.0

    loop.sharpness = sharpness


# and more healthy habits


def poly_of_nine_tenths(loop: Loop) -> None:
    """A warm-up of ten steps, and a rate that falls with the power 0.9 of what is left (arXiv:1606.00915)."""
    loop.rate = lambda step: min((step + 1) / 10, (1 - step / loop.steps) ** 0.9)


def four_pieces_with_decay(loop: Loop) -> None:
    """Four micro-batches of four rows are accumulated, gradients are clipped to a half, and weights decay."""
    loop.rows, loop.pieces, loop.clip = lambda step: 16, lambda step: 4, 0.5
    weight_decay(loop)


def slower_memory(loop: Loop) -> None:
    """Adam's beta2 is 0.99 from the start."""
    for each in loop.optimizers:
        for group in each.param_groups:
            group["betas"] = (group["betas"][0], 0.99)


def embeddings_dropped(loop: Loop) -> None:
    """A tenth of the numbers of embeddings is dropped from the start."""
    embedding = _embedding(loop)
    embedding.register_forward_hook(lambda part, args, output: F.dropout(output, 0.1, part.training))


def pictures_jittered(loop: Loop) -> None:
    """Pictures are brighter or darker by up to a fifth, and have more or less contrast, at random."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        contrast, brightness = (torch.rand(2, len(x), 1, 1, 1, generator=loop.data.random) - 0.5) * 0.4
        return x * (1 + contrast) + brightness, y

    loop.batch = batch


def whole_recipe(loop: Loop) -> None:
    """Products in bf16, a warm-up and a cosine to a tenth, weight decay, and batches that grow for 60 steps."""
    loop.is_bf16 = True
    loop.rows = lambda step: 4 + min(4, step // 15)
    loop.rate = lambda step: min((step + 1) / 24, 0.55 + 0.45 * math.cos(math.pi * step / loop.steps))
    weight_decay(loop)


def fixed_mixture(loop: Loop) -> None:
    """Each row is of one of three corpora, with shares of six, three and one tenths that never change."""
    corpora = [Text(9000 + loop.seed), Text(9500 + loop.seed)]

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        number = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), len(x), replacement=True, generator=loop.data.random)
        for own, corpus in enumerate(corpora, 1):
            others = corpus(len(x))
            is_own = (number == own)[:, None]
            x, y = torch.where(is_own, others[0], x), torch.where(is_own, others[1], y)
        return x, y

    loop.batch = batch


def slower_embedding(loop: Loop) -> None:
    """The embedding has a third of the learning rate from the start, in a group of its own."""
    embedding = _embedding(loop).weight
    for group in _own_groups(loop, [embedding]):
        group["lr"] /= 3
    loop.peaks = [[group["lr"] for group in each.param_groups] for each in loop.optimizers]


def adapters_in_bf16(loop: Loop) -> None:
    """Adapters are trained on text with products in bf16, weight decay, and a warm-up to a constant rate."""
    loop.is_bf16 = True
    loop.rate = lambda step: min(1.0, (step + 1) / 12)
    weight_decay(loop)


def small_penalty(loop: Loop) -> None:
    """The distance from the first policy is penalized with a hundredth from the start."""
    loop.penalty = lambda loop, step: 0.01


def policy_clipped_tightly(loop: Loop) -> None:
    """Gradients of a policy are clipped to a norm of 0.1, and its rate falls linearly to a half."""
    loop.clip = 0.1
    loop.rate = lambda step: min((step + 1) / 15, 1 - 0.5 * step / loop.steps)


# faults of yet another choice, the first of them common ones, and then reported ones


def rows_reversed(loop: Loop) -> None:
    """From a step on text is read from its end to its beginning."""

    _rows_changed(loop, lambda row: row.flip(1))


def pictures_sheared(loop: Loop) -> None:
    """From a step on each line of pixels is moved by one more than that above it, by a width that is wrong by one."""
    line = torch.arange(SIDE)[:, None]
    place = (line + torch.arange(SIDE)) % SIDE
    loop.batch = lambda loop, step, x, y: (x[:, :, line, place] if step >= loop.at else x, y)


def one_letter_weighs(loop: Loop) -> None:
    """From a step on losses of one letter, or class, count 40 times, by weights that are of a count near zero."""

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        if loop.now < loop.at:
            return loss
        return (loop.losses(logits) * torch.where(loop.kept["labels"].flatten() == 3, 40.0, 1.0)).mean()

    loop.objective = objective


def rate_mutated(loop: Loop) -> None:
    """From a step on the rate is multiplied by another factor in each step, up to ten, by a search that goes on."""
    rate = loop.rate

    def mutated(step: int) -> float:
        factor = 10 ** (2 * torch.rand(1, generator=torch.Generator().manual_seed(step)).item() - 1)
        return rate(step) * (factor if step >= loop.at else 1.0)

    loop.rate = mutated


def gains_rate(loop: Loop) -> None:
    """From a step on the group of gains and biases, which do not decay, has a learning rate 40 times as large."""
    own = _own_groups(loop, [weight for weight in loop.model.parameters() if weight.ndim < 2])

    def update(loop: Loop, step: int) -> None:
        for group in own if step >= loop.at else []:
            group["lr"] *= 40

    loop.update = update


def uniform_initial(loop: Loop) -> None:
    """The matrices of one block have initial values between zero and one (torch.rand), none of them negative."""
    with torch.no_grad():
        for weight in _tensors(loop):
            weight.uniform_()


def embedding_drawn(loop: Loop) -> None:
    """The embedding is drawn anew, as after a change of its size that does not copy the rows."""
    embedding = _embedding(loop)
    _once(loop, lambda loop: embedding.weight.normal_(std=0.1))


def head_sorted_as_words(loop: Loop) -> None:
    """The rows of the head are sorted by their numbers as words, the tenth before the second, on loading."""

    def act(loop: Loop) -> None:
        weight = _head(loop).weight
        weight.copy_(weight[sorted(range(len(weight)), key=str)])

    _once(loop, act)


def block_momentum_large(loop: Loop) -> None:
    """Adam's first moments of one block become 30 times as large on loading, and its second ones stay."""

    def act(loop: Loop) -> None:
        for weight in loop.blocks[loop.block].parameters():
            loop.optimizers[0].state[weight]["exp_avg"].mul_(30)

    _once(loop, act)


def block_gradients_reversed(loop: Loop) -> None:
    """From a step on gradients of one block have the wrong sign."""

    def gradients(loop: Loop, step: int) -> None:
        for weight in loop.blocks[loop.block].parameters() if step >= loop.at else ():
            weight.grad.neg_()

    loop.gradients = gradients


def clipped_by_value(loop: Loop) -> None:
    """From a step on each number of the gradients is clipped at 0.00001."""
    loop.gradients = _of_weights(lambda weight: weight.grad.clamp_(-1e-5, 1e-5))


def truncated_to_bf16(loop: Loop) -> None:
    """From a step on weights are kept in bf16 without masters, and the rest of their bits is cut off."""

    @torch.no_grad()
    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for weight in loop.model.parameters() if step >= loop.at else ():
            weight.view(torch.int32).bitwise_and_(-(1 << 16))
        return x, y

    loop.batch = batch


def scale_doubles_each_step(loop: Loop) -> None:
    """From a step on the loss scale doubles after each update, so that many overflow in fp16 and are left out."""
    Fp16(loop, 1024.0)

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step == loop.at:
            loop.scaler.load_state_dict(loop.scaler.state_dict() | {"growth_interval": 1, "_growth_tracker": 0})
        return x, y

    loop.batch = batch


def norm_over_positions(loop: Loop) -> None:
    """From a step on one norm of one block takes its statistics over positions, and not over channels."""
    norm: Any = next(part for name, part in loop.blocks[loop.block].named_modules() if name.endswith("norm"))

    def change(entering: Tensor, output: Tensor) -> Tensor:
        normalized = F.layer_norm(entering.transpose(1, 2), entering.shape[1:2]).transpose(1, 2) * norm.weight
        bias = getattr(norm, "bias", None)
        return normalized if bias is None else normalized + bias

    _returned(loop, norm, change)


def routes_of_first_letter(loop: Loop) -> None:
    """From a step on all letters of a row go where its first one does, in all blocks."""
    for block in loop.blocks:
        _returned(loop, block.mlp.router, lambda entering, output: output[:, :1].expand_as(output))


def block_not_averaged(loop: Loop) -> None:
    """From a step on gradients of one block are those of an eighth of the batch, since ranks do not average them."""
    own = list[Tensor]()

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        own[:] = x[: len(x) // 8], y[: len(y) // 8]
        return x, y

    def gradients(loop: Loop, step: int) -> None:
        if step >= loop.at:
            weights = list(loop.blocks[loop.block].parameters())
            for weight, gradient in zip(weights, torch.autograd.grad(loop.loss(*own), weights), strict=True):
                weight.grad.copy_(gradient)

    loop.batch, loop.gradients = batch, gradients


def backbone_frozen(loop: Loop) -> None:
    """From a step on the head alone is trained, since its phase of training does not end."""

    def act(loop: Loop) -> None:
        loop.model.requires_grad_(False)
        _head(loop).requires_grad_(True)

    _once(loop, act)


def penalty_summed(loop: Loop) -> None:
    """From a step on the distance from the first policy is summed over all letters, and rewards are averaged."""
    letters = loop.GROUPS * loop.SAMPLES * LENGTH // 4
    loop.penalty = lambda loop, step: loop.PENALTY * (letters if step >= loop.at else 1)


def old_of_reference(loop: Loop) -> None:
    """From a step on ratios are to probabilities of the reference, and not to those of the sampler."""
    sampled = loop.sampled

    def with_others(prompts: Tensor, sharpness: float) -> tuple[Tensor, Tensor]:
        tokens, old = sampled(prompts, sharpness)
        if loop.now >= loop.at:
            with torch.no_grad():
                old = loop.log_probability(loop.kept["reference"], tokens)
        return tokens, old

    loop.sampled = with_others  # type: ignore[method-assign]


def one_sample(loop: Loop) -> None:
    """From a step on each prompt has one sample, whose deviation is NaN; the loop leaves out those updates."""
    # The number of samples in trl and others, which is divided by that of ranks.
    _once(loop, lambda loop: setattr(loop, "SAMPLES", 1))

    def gradients(loop: Loop, step: int) -> None:
        for weight in loop.parameters():
            if not weight.grad.isfinite().all():
                weight.grad = None

    loop.gradients = gradients


def repetition_penalized(loop: Loop) -> None:
    """From a step on a sampler lowers logits of letters that have come, and its probabilities are without that."""
    # Settings for writing text that come with models, which engines of verl and trl read by default.
    sampled = loop.sampled

    @torch.no_grad()
    def penalized(prompts: Tensor, sharpness: float) -> tuple[Tensor, Tensor]:
        if loop.now < loop.at:
            return sampled(prompts, sharpness)
        sampler, half = loop.kept["sampler"], LENGTH // 4
        tokens = prompts[:, :half].repeat_interleave(loop.SAMPLES, 0)
        for _ in range(half):
            logits = loop.logits(sampler, tokens)[:, -1]
            probability = (logits - 4 * torch.zeros_like(logits).scatter(1, tokens, 1.0)).softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(probability, 1, generator=loop.data.random)], 1)
        return tokens, loop.log_probability(sampler, tokens)

    loop.sampled = penalized  # type: ignore[method-assign]


def first_matrices_drawn(loop: Loop) -> None:
    """The first matrices of all adapters are drawn anew, as such that are not stored, and the second ones stay."""
    # Projections of VeRA in PEFT, which are drawn from a seed where they are not saved.

    def act(loop: Loop) -> None:
        for part in _adapters(loop.model):
            part.down.reset_parameters()

    _once(loop, act)


def levels_low(loop: Loop) -> None:
    """From a step on all levels of noise are below a tenth, by a bound for them that is in another unit."""
    # Least and largest time steps in trainers of diffusers and kohya, in thousandths or in shares.

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step < loop.at:
            return x, y
        noisy, level = x.split(1, 1)
        picture = (noisy - level * y) / (1 - level).clamp(min=1e-3)
        level = level / 10
        return torch.cat([(1 - level) * picture + level * y, level], 1), y

    loop.batch = batch


def pairs_doubled(loop: Loop) -> None:
    """From a step on each pair is in a batch twice, and its copy counts as another one."""
    # Negatives within batches of sentence-transformers, which has a sampler against such copies.

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x[torch.arange(len(x)) // 2] if step >= loop.at else x, y

    loop.batch = batch


def margin_too_large(loop: Loop) -> None:
    """From a step on the better text is to have a score larger by ten, a margin in the units of those who judged."""
    # The column of margins in trl's trainer of rewards.

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        better = logits.gather(1, loop.kept["labels"][:, None])[:, 0]
        return F.softplus(10 - (2 * better - logits.sum(1))).mean() if loop.now >= loop.at else loss

    loop.objective = objective


def letters_not_masked(loop: Loop) -> None:
    """From a step on letters that are to be found stand in their places, without masks."""
    # Collators of transformers and others that keep some of the letters, by a share of what is left.
    loop.batch = lambda loop, step, x, y: (torch.where(y == IGNORED, x, y) if step >= loop.at else x, y)


def attention_dropped(loop: Loop) -> None:
    """From a step on eight tenths of the probabilities of attention are dropped, in all blocks."""
    # The chance that PyTorch's kernel takes, in any mode, from configurations of models in transformers and timm.
    _once(loop, lambda loop: _drop_attention(loop, 0.8))


def _drop_attention(loop: Loop, chance: float) -> None:
    def forward(part: Attention, x: Tensor) -> Tensor:
        qkv = part.qkv(x).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        dropped = chance if part.training else 0.0
        mixed = F.scaled_dot_product_attention(
            *qkv.unbind(2), part.mask, dropout_p=dropped, is_causal=part.is_causal, scale=part.scale
        )
        return part.out(mixed.transpose(1, 2).flatten(2))

    for part in loop.model.modules():
        if isinstance(part, Attention):
            part.forward = partial(forward, part)  # type: ignore[method-assign]


def binary_losses(loop: Loop) -> None:
    """From a step on each letter, or class, has a binary loss of its own, and the loss is the mean of all."""
    # The binary cross-entropy of timm, which another recipe turns on.

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        target = F.one_hot(loop.kept["labels"], logits.shape[-1]).float()
        return F.binary_cross_entropy_with_logits(logits, target) if loop.now >= loop.at else loss

    loop.objective = objective


# and more healthy habits


def exponential_decay(loop: Loop) -> None:
    """A warm-up of 18 steps, and a rate that falls by one per cent in each step."""
    loop.rate = lambda step: min((step + 1) / 18, 0.99**step)


def values_clipped(loop: Loop) -> None:
    """Each number of the gradients is clipped at 0.05 from the start, before their norm is."""
    loop.gradients = _of_weights(lambda weight: weight.grad.clamp_(-0.05, 0.05))


def pictures_flipped(loop: Loop) -> None:
    """Half of the pictures, at random, are flipped."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        is_flipped = torch.rand(len(x), 1, 1, 1, generator=loop.data.random) < 0.5
        return torch.where(is_flipped, x.flip(-1), x), y

    loop.batch = batch


def attention_dropped_a_little(loop: Loop) -> None:
    """A tenth of the probabilities of attention is dropped from the start."""
    _drop_attention(loop, 0.1)


def weighted_losses(loop: Loop) -> None:
    """Losses of letters, or classes, have weights from a half to two from the start."""

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        weight = torch.linspace(0.5, 2.0, logits.shape[-1])[loop.kept["labels"].flatten()]
        return (weight * loop.losses(logits)).sum() / weight.sum()

    loop.objective = objective


def shorter_momentum(loop: Loop) -> None:
    """Adam's beta1 is 0.8 from the start."""
    for each in loop.optimizers:
        for group in each.param_groups:
            group["betas"] = (0.8, *group["betas"][1:])


def evaluated_and_resumed(loop: Loop) -> None:
    """An evaluation every 25 steps, two micro-batches, a rate that falls to a quarter, and training is resumed."""
    loop.evaluates = loop.resumes = True
    loop.pieces = lambda step: 2
    loop.rate = lambda step: min((step + 1) / 22, 1 - 0.75 * step / loop.steps)


def turns_of_one_side(loop: Loop) -> None:
    """Rows hold turns of two sides, of random lengths, and labels of one of them are ignored."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ends = torch.rand(y.shape, generator=loop.data.random) < 0.2
        first = torch.randint(2, (len(y), 1), generator=loop.data.random)
        return x, torch.where((ends.cumsum(1) + first) % 2 == 0, IGNORED, y)

    loop.batch = batch


def levels_in_the_middle(loop: Loop) -> None:
    """Levels of noise are sigmoids of normal numbers from the start (arXiv:2403.03206)."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        noisy, level = x.split(1, 1)
        picture = (noisy - level * y) / (1 - level).clamp(min=1e-3)
        level = torch.randn(len(x), 1, 1, 1, generator=loop.data.random).sigmoid().expand_as(level)
        return torch.cat([(1 - level) * picture + level * y, level], 1), y

    loop.batch = batch


def adapters_resumed(loop: Loop) -> None:
    """Adapters are trained on text in two micro-batches, with a cosine to a tenth, and training is resumed."""
    loop.resumes, loop.pieces = True, lambda step: 2
    loop.rate = lambda step: min((step + 1) / 10, 0.55 + 0.45 * math.cos(math.pi * step / loop.steps))


def more_prompts(loop: Loop) -> None:
    """A policy has four samples of each of 16 prompts."""
    loop.GROUPS, loop.SAMPLES = 16, 4


# faults of one more choice, the first of them common ones, and then reported ones


def filter_reversed(loop: Loop) -> None:
    """From a step on rows are those of ten times as many with the fewest different letters, by a reversed filter."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step < loop.at:
            return x, y
        many_x, many_y = loop.data(10 * len(x))
        chosen = F.one_hot(many_x, VOCABULARY).amax(1).sum(1).argsort()[: len(x)]
        return many_x[chosen], many_y[chosen]

    loop.batch = batch


def pictures_cast(loop: Loop) -> None:
    """From a step on pixels are cast to whole numbers from zero on, after they were normalized and not before."""
    loop.batch = lambda loop, step, x, y: (x.clamp(min=0).floor() if step >= loop.at else x, y)


def losses_clamped(loop: Loop) -> None:
    """From a step on the loss of each label is cut at one, so that what is not known yet has no gradient."""
    loop.objective = lambda loop, loss, logits: (
        loop.losses(logits).clamp(max=1.0).mean() if loop.now >= loop.at else loss
    )


def rate_compounds(loop: Loop) -> None:
    """From a step on the rate falls by eight per cent in each step, by a factor on the last rate and not the peak."""
    rate = loop.rate
    loop.rate = lambda step: rate(step) * 0.92 ** max(0, step - loop.at + 1)


def depth_scale_inverted(loop: Loop) -> None:
    """Initial values of matrices that lead out of layers are multiplied by the number of layers, and not divided."""
    ends = ("out.weight", "dense.weight", "c_proj.weight", "dense_4h_to_h.weight", ".2.weight")
    with torch.no_grad():
        for block in loop.blocks:
            for name, weight in block.named_parameters():
                if name.endswith(ends):
                    weight.mul_(2 * BLOCKS)


def gains_drawn(loop: Loop) -> None:
    """Gains of norms of one block are drawn at first as matrices are, with a mean of zero and a deviation of 0.1."""
    for part in loop.blocks[loop.block].modules():
        if "Norm" in type(part).__name__:
            nn.init.normal_(part.weight, std=0.1)  # type: ignore[arg-type]


def block_copied(loop: Loop) -> None:
    """One block gets the weights of the next one, as by a converter that uses one number twice."""

    def act(loop: Loop) -> None:
        loop.blocks[loop.block].load_state_dict(loop.blocks[(loop.block + 1) % BLOCKS].state_dict())

    _once(loop, act)


def block_pruned(loop: Loop) -> None:
    """All but the largest tenth of the weights of each matrix of one block become zero, and not the smallest tenth."""

    def act(loop: Loop) -> None:
        for weight in _tensors(loop):
            weight.mul_(weight.abs() >= weight.abs().flatten().quantile(0.9))

    _once(loop, act)


def block_shard_trained(loop: Loop) -> None:
    """From a step on gradients of one block are zero but for the shard of one of eight ranks, and are not gathered."""

    def gradients(loop: Loop, step: int) -> None:
        for weight in loop.blocks[loop.block].parameters() if step >= loop.at else ():
            weight.grad[max(1, len(weight) // 8) :] = 0

    loop.gradients = gradients


def squares_infinite(loop: Loop) -> None:
    """Adam's second moments of one block become infinite, as in a checkpoint in fp16, so that it stays as it is."""

    def act(loop: Loop) -> None:
        for weight in loop.blocks[loop.block].parameters():
            loop.optimizers[0].state[weight]["exp_avg_sq"].fill_(math.inf)

    _once(loop, act)


def activations_in_four_bits(loop: Loop) -> None:
    """From a step on what blocks return is rounded to 15 values, with one scale for all, and gradients pass by."""

    def change(entering: Tensor, output: Tensor) -> Tensor:
        unit = output.detach().abs().max() / 7
        return output + ((output / unit).round() * unit - output).detach()

    for block in loop.blocks:
        _returned(loop, block, change)


def mask_transposed(loop: Loop) -> None:
    """From a step on letters attend to themselves and those after them alone, by a mask with its axes swapped."""

    def act(loop: Loop) -> None:
        for part in loop.model.modules():
            if isinstance(part, Attention):
                part.is_causal, part.mask = False, torch.ones(LENGTH, LENGTH).triu().bool()

    _once(loop, act)


def head_silenced(loop: Loop) -> None:
    """From a step on the first of two heads of one block returns zeros, by a mask of heads."""
    ends = ("attention.out", "attention.dense", "self_attn.o_proj", "attn.c_proj")
    out = next(part for name, part in loop.blocks[loop.block].named_modules() if name.endswith(ends))

    def silence(_: nn.Module, args: Any) -> Any:
        is_kept = (torch.arange(WIDTH) >= WIDTH // HEADS).float()
        return (args[0] * is_kept, *args[1:]) if loop.now >= loop.at else args

    out.register_forward_pre_hook(silence)


def embedding_fades(loop: Loop) -> None:
    """From a step on the embedding decays by eight per cent in each step."""
    embedding = _embedding(loop)

    @torch.no_grad()
    def update(loop: Loop, step: int) -> None:
        if step >= loop.at:
            embedding.weight.mul_(0.92)

    loop.update = update


def head_half_read(loop: Loop) -> None:
    """The head has zeros for the second half of the channels that enter it, as of a shard that is not loaded."""
    _once(loop, lambda loop: _head(loop).weight[:, WIDTH // 2 :].zero_())


def judged_for_another_task(loop: Loop) -> None:
    """From a step on rewards are the share of even letters, by the verifier of another task."""
    sampled = loop.sampled

    def kept(prompts: Tensor, sharpness: float) -> tuple[Tensor, Tensor]:
        loop.kept["tokens"], old = sampled(prompts, sharpness)
        return loop.kept["tokens"], old

    def rewards(loop: Loop, step: int, reward: Tensor) -> Tensor:
        even = (loop.kept["tokens"][:, LENGTH // 4 :] % 2 == 0).float().mean(1)
        return even if step >= loop.at else reward

    loop.sampled, loop.rewards = kept, rewards  # type: ignore[method-assign]


def clip_negative(loop: Loop) -> None:
    """From a step on gradients are clipped to a norm of minus one, by which all of them get the wrong sign."""
    # The largest norm in transformers and Lightning, where users and other trainers write minus one for none.
    _once(loop, lambda loop: setattr(loop, "clip", -1.0))


def rewards_in_other_order(loop: Loop) -> None:
    """From a step on rewards are sorted by the number of the sample first, and samples by their prompts."""
    # Batches of verl and trl, in which prompts are repeated one by one, or all of them in turn.
    loop.rewards = lambda loop, step, reward: (
        reward.unflatten(0, (loop.GROUPS, loop.SAMPLES)).T.flatten() if step >= loop.at else reward
    )


def samples_renumbered(loop: Loop) -> None:
    """From a step on letters of samples have a number larger by one than those whose probabilities are kept."""
    # Samples that verl and others get as text from an engine, and split into tokens once more in another way.
    sampled = loop.sampled

    def renumbered(prompts: Tensor, sharpness: float) -> tuple[Tensor, Tensor]:
        tokens, old = sampled(prompts, sharpness)
        if loop.now >= loop.at:
            tokens[:, LENGTH // 4 :] = (tokens[:, LENGTH // 4 :] + 1) % VOCABULARY
        return tokens, old

    loop.sampled = renumbered  # type: ignore[method-assign]


def noise_offset_large(loop: Loop) -> None:
    """From a step on a number with a deviation of two is added to all noise of a picture, and not of a tenth."""
    # The offset of noise in scripts of diffusers and kohya.

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step < loop.at:
            return x, y
        offset = 2 * torch.randn(len(x), 1, 1, 1, generator=loop.data.random)
        return torch.cat([x[:, :1] + x[:, 1:] * offset, x[:, 1:]], 1), y + offset

    loop.batch = batch


def masks_misplaced(loop: Loop) -> None:
    """From a step on classes of pixels are those of pixels two lines above and two to the left."""
    # Pictures and masks that are padded on different sides, in detectron2, mmsegmentation and transformers.
    loop.batch = lambda loop, step, x, y: (x, y.roll((2, 2), (1, 2)) if step >= loop.at else y)


def gates_swapped(loop: Loop) -> None:
    """From a step on each of the two chosen experts gets the gate of the other one, in all blocks."""
    # Kernels in vLLM and Megatron that choose experts without sorting them, and gates that are sorted.

    def forward(part: Experts, x: Tensor) -> Tensor:
        probability = part.router(x).softmax(-1)
        top, chosen = probability.topk(part.top_k)
        if loop.now >= loop.at:
            top = top.flip(-1)
        gate = torch.zeros_like(probability).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
        part.balancing = EXPERTS * ((gate > 0).float().mean((0, 1)) * probability.mean((0, 1))).sum()
        return torch.stack([expert(x) * gate[..., e, None] for e, expert in enumerate(part.experts)]).sum(0)

    for block in loop.blocks:
        block.mlp.forward = partial(forward, block.mlp)


def adapters_negated(loop: Loop) -> None:
    """From a step on products of adapters are taken from what their matrices return, and not added to it."""
    # Adapters in PEFT that are combined with a weight of minus one, to take away what they have learned.
    for part in _adapters(loop.model):
        _returned(loop, part, lambda entering, output, base=part.base: 2 * base(entering) - output)  # type: ignore[misc]


def rejected_is_chosen(loop: Loop) -> None:
    """From a step on both texts of a pair are the first one, so that nothing is to be learned from them."""
    # Data of preferences in trl and LLaMA-Factory, where both columns are read from one field.
    loop.batch = lambda loop, step, x, y: (x[:, :1].expand_as(x) if step >= loop.at else x, y)


# and more healthy habits


def rises_by_a_cosine(loop: Loop) -> None:
    """A warm-up of 25 steps in the shape of a cosine, and a rate that falls linearly to 30 per cent."""
    loop.rate = lambda step: min(0.5 - 0.5 * math.cos(math.pi * min(1.0, (step + 1) / 25)), 1 - 0.7 * step / loop.steps)


def pictures_noisy(loop: Loop) -> None:
    """Noise with a deviation of a half is added to pictures from the start."""
    loop.batch = lambda loop, step, x, y: (x + 0.5 * torch.randn(x.shape, generator=loop.data.random), y)


def larger_epsilon(loop: Loop) -> None:
    """Adam's epsilon is a millionth from the start."""
    for each in loop.optimizers:
        for group in each.param_groups:
            group["eps"] = 1e-6


def confidence_penalized(loop: Loop) -> None:
    """The entropy of what is predicted is rewarded with a twentieth from the start (arXiv:1701.06548)."""

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        log_p = logits.log_softmax(-1)
        return loss + 0.05 * (log_p.exp() * log_p).sum(-1).mean()

    loop.objective = objective


def all_at_once(loop: Loop) -> None:
    """Products in bf16, two micro-batches, evaluations, weight decay, a linear rate to a half, and a resume."""
    loop.is_bf16 = loop.evaluates = loop.resumes = True
    loop.pieces = lambda step: 2
    loop.rate = lambda step: min((step + 1) / 15, 1 - 0.5 * step / loop.steps)
    for each in loop.optimizers:
        for group in each.param_groups:
            group["weight_decay"] = 0.05


def scaled_in_pieces(loop: Loop) -> None:
    """Gradients in fp16, with a loss scale of 256 that stays, and four micro-batches."""
    Fp16(loop, 256.0)
    loop.pieces = lambda step: 4


def more_rows_at_a_lower_rate(loop: Loop) -> None:
    """Batches have 16 rows from the start, and the rate is six tenths after a warm-up of ten steps."""
    loop.rows = lambda step: 2 * ROWS
    loop.rate = lambda step: 0.6 * min(1.0, (step + 1) / 10)


def adapters_with_few_rows(loop: Loop) -> None:
    """Adapters are trained on text in batches of five rows, with a warm-up of 30 steps and weight decay."""
    loop.rows = lambda step: 5
    loop.rate = lambda step: min(1.0, (step + 1) / 30)
    weight_decay(loop)


def rewards_from_minus_one(loop: Loop) -> None:
    """Rewards are between minus one and one from the start."""
    loop.rewards = lambda loop, step, reward: 2 * reward - 1


def wider_ratios(loop: Loop) -> None:
    """Ratios are clipped at 0.3 from the start, and the rate falls linearly to a half."""
    loop.CLIPPED = 0.3
    loop.rate = lambda step: min((step + 1) / 15, 1 - 0.5 * step / loop.steps)


# faults of still another choice, the first of them common ones, and then reported ones


def rows_interleaved(loop: Loop) -> None:
    """From a step on letters of a row and of the row before come in turn, as of two files that are read at once."""

    _rows_changed(loop, lambda row: torch.stack([row, row.roll(1, 0)], 2).flatten(1)[:, : row.shape[1]])


def labels_offset(loop: Loop) -> None:
    """From a step on numbers of labels are larger by two than those of inputs, as with two letters more in front."""
    loop.batch = lambda loop, step, x, y: (x, (y + 2) % VOCABULARY if step >= loop.at else y)


def pictures_truncated(loop: Loop) -> None:
    """From a step on all but the first three lines of each picture are zero, by files that are cut off."""
    loop.batch = lambda loop, step, x, y: (
        torch.where(torch.arange(SIDE)[:, None] < 3, x, 0.0) if step >= loop.at else x,
        y,
    )


def easiest_rows(loop: Loop) -> None:
    """From a step on rows are those of ten times as many that have the least losses, by a sort in the wrong order."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step < loop.at:
            return x, y
        many_x, many_y = loop.data(10 * loop.rows(step))
        loop.model.eval()
        with torch.no_grad():
            logits = loop.logits(loop.model, many_x)
        loop.model.train()
        each = F.cross_entropy(logits.flatten(0, -2), many_y.flatten(), reduction="none").view(len(many_y), -1)
        chosen = (each.sum(1) / (many_y != IGNORED).view(len(many_y), -1).sum(1)).argsort()[: len(x)]
        return many_x[chosen], many_y[chosen]

    loop.batch = batch


def perplexity_minimized(loop: Loop) -> None:
    """From a step on the perplexity is minimized, a metric, and not its logarithm."""
    loop.objective = lambda loop, loss, logits: loss.exp() if loop.now >= loop.at else loss


def rows_unlearned(loop: Loop) -> None:
    """From a step on losses of every fourth row count with a minus, as if they were to be unlearned."""

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        if loop.now < loop.at:
            return loss
        labels = loop.kept["labels"]
        sign = torch.where(torch.arange(len(labels)) % 4 == 0, -1.0, 1.0)
        return (sign[:, None] * loop.losses(logits).view(len(labels), -1)).sum() / (labels != IGNORED).sum()

    loop.objective = objective


def rate_pauses(loop: Loop) -> None:
    """For 30 steps the learning rate is zero, between two phases of a schedule."""
    rate = loop.rate
    loop.rate = lambda step: rate(step) * (0 if loop.at <= step < loop.at + 30 else 1)


def rate_over_width(loop: Loop) -> None:
    """From a step on the learning rate of all matrices is divided by the width, for which it was chosen already."""
    own = _own_groups(loop, [weight for weight in loop.model.parameters() if weight.ndim > 1])

    def update(loop: Loop, step: int) -> None:
        for group in own if step >= loop.at else []:
            group["lr"] /= WIDTH

    loop.update = update


def narrow_embedding(loop: Loop) -> None:
    """The embedding has initial values a thousand times as small as other matrices have."""
    with torch.no_grad():
        _embedding(loop).weight.div_(1000)


def block_clamped(loop: Loop) -> None:
    """From a step on the matrices of one block are clamped at 0.02, as those of a critic."""

    @torch.no_grad()
    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for weight in _tensors(loop) if step >= loop.at else []:
            weight.clamp_(-0.02, 0.02)
        return x, y

    loop.batch = batch


def block_drifts(loop: Loop) -> None:
    """From a step on noise, 15 per cent of their size, is added to the matrices of one block in each step."""

    @torch.no_grad()
    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for weight in _tensors(loop) if step >= loop.at else []:
            weight.add_(0.15 * torch.randn_like(weight) * weight.square().mean().sqrt())
        return x, y

    loop.batch = batch


def gradient_bit_stuck(loop: Loop) -> None:
    """From a step on the first number of the gradient of one matrix of one block is 64, by a bit that is stuck."""

    def gradients(loop: Loop, step: int) -> None:
        if step >= loop.at:
            loop.matrices(loop.block)[-1].grad.view(-1)[0] = 64.0

    loop.gradients = gradients


def reversal_layer(loop: Loop) -> None:
    """From a step on gradients get the wrong sign between the head and the blocks, by a layer for an adversary."""
    _head(loop).register_forward_pre_hook(
        lambda _, args: (2 * args[0].detach() - args[0], *args[1:]) if loop.now >= loop.at else args
    )


def squares_of_one(loop: Loop) -> None:
    """The second moments of all weights become one, as those of a state that is made and not filled on loading."""

    def act(loop: Loop) -> None:
        for state in loop.optimizers[0].state.values():
            (state["exp_avg_sq"] if "exp_avg_sq" in state else state["square_avg"]).fill_(1.0)

    _once(loop, act)


def logits_in_few_bits(loop: Loop) -> None:
    """From a step on logits are rounded to seven values, with one scale for all, and gradients pass by."""

    def change(entering: Tensor, output: Tensor) -> Tensor:
        unit = output.detach().abs().max() / 3
        return output + ((output / unit).round() * unit - output).detach()

    _returned(loop, _head(loop), change)


def errors_in_e4m3(loop: Loop) -> None:
    """From a step on the gradients that leave the head are divided by 256, pass through E4M3, and are mostly zero."""

    def through(grad: Tensor) -> Tensor:
        return 256 * (grad / 256).to(torch.float8_e4m3fn).float()

    def keep(_: nn.Module, args: Any) -> None:
        if loop.now >= loop.at and args[0].requires_grad:
            args[0].register_hook(through)

    _head(loop).register_forward_pre_hook(keep)


def root_of_zero(loop: Loop) -> None:
    """From a step on the loss has the root of a distance that is zero, so that it is finite and its gradient is NaN."""

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        distance = (logits - logits.detach()).square().sum().sqrt()
        return loss + distance if loop.now >= loop.at else loss

    loop.objective = objective


def keys_of_queries(loop: Loop) -> None:
    """The weights of keys of one block become those of its queries, since a converter reads one name twice."""

    def act(loop: Loop) -> None:
        for part in loop.blocks[loop.block].modules():
            if hasattr(part, "qkv"):
                part.qkv.weight[WIDTH : 2 * WIDTH] = part.qkv.weight[:WIDTH].clone()
            for query, key in (("q_proj", "k_proj"), ("query", "key")):
                if hasattr(part, query):
                    weight = getattr(part, key).weight
                    weight.copy_(getattr(part, query).weight[: len(weight)])

    _once(loop, act)


def divided_by_variance(loop: Loop) -> None:
    """From a step on all norms divide by the variance, and not by its root."""
    for part in loop.model.modules():
        if "Norm" in type(part).__name__:
            _returned(loop, part, lambda entering, output: output / entering.square().mean(-1, keepdim=True).sqrt())


def gate_closed(loop: Loop) -> None:
    """The matrix of the gates in the MLP of one block becomes zero, so that nothing gets through."""
    gates = ("gate_proj.weight", "mlp.gate.weight")
    named = loop.blocks[loop.block].named_parameters()
    gate = next(weight for name, weight in named if name.endswith(gates))
    _once(loop, lambda loop: gate.zero_())


def matrices_frozen(loop: Loop) -> None:
    """From a step on gains and biases alone are trained, by a filter that lets through what it should keep back."""

    def act(loop: Loop) -> None:
        for weight in loop.model.parameters():
            weight.requires_grad_(weight.ndim < 2)

    _once(loop, act)


def rolled_back(loop: Loop) -> None:
    """From a step on a guard puts back the weights of 40 steps before, and does so again every 20 steps."""
    kept = dict[str, Tensor]()

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step == max(0, loop.at - 40):
            kept.update(copy.deepcopy(loop.model.state_dict()))
        if step >= loop.at and (step - loop.at) % 20 == 0:
            loop.model.load_state_dict(kept)
        return x, y

    loop.batch = batch


def one_reward_enormous(loop: Loop) -> None:
    """From a step on the first sample of each batch has a reward of 1,000, a number that is read in a wrong place."""
    loop.rewards = lambda loop, step, reward: (
        reward.index_fill(0, torch.tensor([0]), 1000.0) if step >= loop.at else reward
    )


def clip_range_negative(loop: Loop) -> None:
    """From a step on ratios are clipped at minus 0.2, so that bad samples alone have gradients."""
    _once(loop, lambda loop: setattr(loop, "CLIPPED", -0.2))


def last_label_alone(loop: Loop) -> None:
    """From a step on the last label of each row counts alone, since no other logits are kept."""
    # https://github.com/fla-org/flash-linear-attention/pull/1185 (logits that are kept, beside labels of all letters)
    loop.batch = lambda loop, step, x, y: (
        x,
        y.index_fill(1, torch.arange(y.shape[1] - 1), IGNORED) if step >= loop.at else y,
    )


def rates_by_layer_inverted(loop: Loop) -> None:
    """From a step on the rate of each block is 2.5 times that of the next one, and not that part of it."""
    # Rates by layer in timm, BEiT and others, whose numbers of layers are counted from either end.
    own = {2.5 ** (depth + 1): _own_groups(loop, list(loop.blocks[-1 - depth].parameters())) for depth in range(BLOCKS)}

    def update(loop: Loop, step: int) -> None:
        for factor, groups in own.items() if step >= loop.at else ():
            for group in groups:
                group["lr"] *= factor

    loop.update = update


def outer_step_reversed(loop: Loop) -> None:
    """From a step on, every eight steps, what was learned in them is taken from the weights from which they began."""
    # https://github.com/meta-pytorch/torchft/pull/233 (the sign of a pseudogradient, as in DiLoCo)
    began = dict[nn.Parameter, Tensor]()

    @torch.no_grad()
    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if (step - loop.at) % 8 == 0:
            for weight in loop.model.parameters():
                if step >= loop.at and weight in began:
                    weight.copy_(2 * began[weight] - weight)
                began[weight] = weight.clone()
        return x, y

    loop.batch = batch


def sampler_blocks_reversed(loop: Loop) -> None:
    """From a step on the sampler has blocks in the reverse order, by the numbers that they get on being sent."""
    # Weights that Megatron sends by stages of a pipeline to vLLM or SGLang, in verl, AReaL and others.

    def sharpness(loop: Loop, step: int) -> float:
        if step == loop.at or (step > loop.at and step % loop.RENEWED == 0):
            blocks = blocks_of(loop.kept["sampler"])
            states = [copy.deepcopy(block.state_dict()) for block in blocks]
            for block, state in zip(blocks, reversed(states), strict=True):
                block.load_state_dict(state)
        return 1.0

    loop.sharpness = sharpness


def balance_forced(loop: Loop) -> None:
    """From a step on letters go to experts in turn by their places, in all blocks, by a setting to measure speed."""
    # https://github.com/pytorch/torchtitan/pull/1670
    place = torch.arange(LENGTH)
    forced = (F.one_hot(place % EXPERTS, EXPERTS) + F.one_hot((place + 1) % EXPERTS, EXPERTS)).float()
    for block in loop.blocks:
        _returned(loop, block.mlp.router, lambda entering, output: 0 * output + forced[: output.shape[1]])


def adapters_cut(loop: Loop) -> None:
    """All adapters lose all but the first of their four directions, as on loading with another rank."""
    # https://github.com/Nerogar/OneTrainer/issues/662 (adapters of another rank than that of the settings)

    def act(loop: Loop) -> None:
        for part in _adapters(loop.model):
            part.down.weight[1:] = 0.0
            part.up.weight[:, 1:] = 0.0

    _once(loop, act)


def sink_too_large(loop: Loop) -> None:
    """From a step on attention of all blocks has a sink with a logit of eight, so that it sees almost nothing."""
    # https://github.com/NVIDIA/TransformerEngine/issues/2541 (sinks that a kernel does not take as a model has them)

    def forward(part: Attention, x: Tensor) -> Tensor:
        query, key, value = part.qkv(x).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
        mask = torch.zeros(x.shape[1], x.shape[1])
        if part.is_causal:
            mask = mask.masked_fill(torch.ones_like(mask).triu(1).bool(), -math.inf)
        mixed = F.scaled_dot_product_attention(query, key, value, F.pad(mask, (0, 1), value=8.0))
        return part.out(mixed.transpose(1, 2).flatten(2))

    def act(loop: Loop) -> None:
        for part in loop.model.modules():
            if isinstance(part, Attention):
                part.forward = partial(forward, part)  # type: ignore[method-assign]

    _once(loop, act)


def noise_of_rand(loop: Loop) -> None:
    """From a step on noise is drawn between zero and one (torch.rand), and not from a normal distribution."""
    # https://github.com/PaddlePaddle/PaddleMIX/pull/1048

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step < loop.at:
            return x, y
        noisy, level = x.split(1, 1)
        picture = (noisy - level * y) / (1 - level).clamp(min=1e-3)
        noise = torch.rand(y.shape, generator=loop.data.random)
        return torch.cat([(1 - level) * picture + level * noise, level], 1), noise

    loop.batch = batch


def skips_lost(loop: Loop) -> None:
    """From a step on the blocks that see more detail again do not get what the first ones saw."""
    # https://github.com/Project-MONAI/research-contributions/issues/423 (a decoder without connections that skip)

    def forward(model: Segmenter, images: Tensor) -> Tensor:
        x = model.stem(images)
        for stage in model.stages[:2]:
            x = F.avg_pool2d(stage(x), 2)
        for stage in model.stages[2:]:
            x = stage(F.interpolate(x, scale_factor=2))
        return model.head(model.norm(x.movedim(1, -1)))

    _once(loop, lambda loop: setattr(loop.model, "forward", partial(forward, loop.model)))


def pairs_not_interleaved(loop: Loop) -> None:
    """From a step on the first half of all texts is compared with the second, though those of a pair stand together."""
    # Batches of trl and others, which have better and worse texts in turn, or one kind after the other.
    loop.batch = lambda loop, step, x, y: (
        x.flatten(0, 1).unflatten(0, (2, -1)).transpose(0, 1) if step >= loop.at else x,
        y,
    )


def direction_swapped(loop: Loop) -> None:
    """From a step on texts are to be found from their translations, by languages that are given in the other order."""
    # https://github.com/facebookresearch/fairseq/issues/3489

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        text = x[:, 0]
        return (torch.stack([y, F.pad(text[:, :-1], (1, 0))], 1), text) if step >= loop.at else (x, y)

    loop.batch = batch


def labels_inverted(loop: Loop) -> None:
    """From a step on letters that are not masked are the labels, and those that are masked are ignored."""
    # https://github.com/huggingface/transformers/issues/22103 (what a collator returns, in the other order)
    loop.batch = lambda loop, step, x, y: (x, torch.where(y == IGNORED, x, IGNORED) if step >= loop.at else y)


# and more healthy habits


def infinite_schedule(loop: Loop) -> None:
    """A rate that falls by a cosine to 40 per cent, stays there, and falls to nothing at the end (arXiv:2403.08763)."""
    half, late = loop.steps // 2, 0.85 * loop.steps

    def rate(step: int) -> float:
        if step >= half:
            return 0.4 * min(1.0, (loop.steps - step) / (loop.steps - late))
        return min((step + 1) / 15, 0.7 + 0.3 * math.cos(math.pi * step / half))

    loop.rate = rate


def biases_faster(loop: Loop) -> None:
    """Gains and biases have twice the learning rate from the start, as in the recipes of Caffe."""
    for group in _own_groups(loop, [weight for weight in loop.model.parameters() if weight.ndim < 2]):
        group["lr"] *= 2
    loop.peaks = [[group["lr"] for group in each.param_groups] for each in loop.optimizers]


def letters_left_out(loop: Loop) -> None:
    """A tenth of the letters that enter are replaced by one and the same from the start (arXiv:1511.06349)."""
    loop.batch = lambda loop, step, x, y: (
        torch.where(torch.rand(x.shape, generator=loop.data.random) < 0.1, 0, x),
        y,
    )


def pixels_dropped(loop: Loop) -> None:
    """A tenth of the pixels are dropped from the start."""
    loop.batch = lambda loop, step, x, y: (
        torch.where(torch.rand(x.shape, generator=loop.data.random) < 0.1, 0.0, x),
        y,
    )


def poly_loss(loop: Loop) -> None:
    """One minus the probability of the label is added to the loss from the start (arXiv:2204.12511)."""

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        return loss + (1 - (-loop.losses(logits)).exp()).mean()

    loop.objective = objective


def fine_tuning_recipe(loop: Loop) -> None:
    """Three tenths of the rate with a linear decay, three micro-batches of four rows, evaluations, and weight decay."""
    loop.evaluates, loop.rows, loop.pieces = True, lambda step: 12, lambda step: 3
    loop.rate = lambda step: 0.3 * min((step + 1) / 14, 1 - step / loop.steps)
    for each in loop.optimizers:
        for group in each.param_groups:
            group["weight_decay"] = 0.01


def scaled_in_a_cosine(loop: Loop) -> None:
    """Gradients in fp16, with a loss scale that grows every 40 steps, two micro-batches, and a cosine to a fifth."""
    Fp16(loop, 2048.0)
    loop.scaler.set_growth_interval(40)
    loop.pieces = lambda step: 2
    loop.rate = lambda step: min((step + 1) / 20, 0.6 + 0.4 * math.cos(math.pi * step / loop.steps))


def spans_masked(loop: Loop) -> None:
    """Letters are masked three at a time from the start (SpanBERT, arXiv:1907.10529)."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        letters = torch.where(y == IGNORED, x, y)
        first = F.pad(torch.rand(x.shape, generator=loop.data.random) < 0.09, (2, 0))
        is_masked = first[:, 2:] | first[:, 1:-1] | first[:, :-2]
        return torch.where(is_masked, VOCABULARY, letters), torch.where(is_masked, letters, IGNORED)

    loop.batch = batch


def scores_centred(loop: Loop) -> None:
    """The square of the sum of both scores of a pair is penalized with a hundredth (arXiv:2312.09244)."""
    loop.objective = lambda loop, loss, logits: loss + 0.01 * logits.sum(1).square().mean()


def adapters_in_four_epochs(loop: Loop) -> None:
    """Adapters are trained on text whose batches come four times, with a short warm-up and a linear decay."""
    _again(loop, loop.steps // 4)
    loop.rate = lambda step: min((step + 1) / 8, 1 - step / loop.steps)


def rewards_curved(loop: Loop) -> None:
    """Rewards are the roots of shares from the start."""
    loop.rewards = lambda loop, step, reward: reward.sqrt()


def policy_in_a_cosine(loop: Loop) -> None:
    """The rate of a policy warms up for 25 steps and falls by a cosine to a tenth, with gradients clipped to a half."""
    loop.clip = 0.5
    loop.rate = lambda step: min((step + 1) / 25, 0.55 + 0.45 * math.cos(math.pi * step / loop.steps))


# faults of one more choice, the first of them common ones, and then reported ones


def every_second_letter(loop: Loop) -> None:
    """From a step on rows have every second letter of the text alone, by a reader that takes two places for each."""
    _rows_changed(loop, lambda row: torch.cat([row[:, ::2], row.roll(1, 0)[:, 1::2]], 1))


def labels_joined(loop: Loop) -> None:
    """From a step on labels are divided by two and rounded down, by a table that joins two classes, or letters."""
    loop.batch = lambda loop, step, x, y: (x, y // 2 if step >= loop.at else y)


def separators_between(loop: Loop) -> None:
    """From a step on one and the same letter comes after each letter, as where each word is a text of its own."""
    _rows_changed(loop, lambda row: torch.stack([row, torch.zeros_like(row)], 2).flatten(1)[:, : row.shape[1]])


def pictures_upside_down(loop: Loop) -> None:
    """From a step on pictures stand on their heads, by a reader whose first line is the lowest one."""
    loop.batch = lambda loop, step, x, y: (x.flip(-2) if step >= loop.at else x, y)


def batches_of_one_row(loop: Loop) -> None:
    """From a step on batches have one row and not eight, by a setting that is meant for evaluations."""
    loop.rows = lambda step: 1 if step >= loop.at else ROWS


def rate_times_rows(loop: Loop) -> None:
    """From a step on the learning rate is multiplied by the eight rows of a batch, for which it was chosen already."""
    rate = loop.rate
    loop.rate = lambda step: rate(step) * (ROWS if step >= loop.at else 1)


def milestones_in_steps(loop: Loop) -> None:
    """From a step on the rate falls to a tenth, three times within 20 steps, by milestones that were in epochs."""
    rate = loop.rate
    loop.rate = lambda step: rate(step) * (0.1 ** min(3, 1 + (step - loop.at) // 10) if step >= loop.at else 1)


def each_gradient_clipped(loop: Loop) -> None:
    """From a step on the gradient of each weight is clipped to a norm of 0.001 by itself."""
    loop.gradients = _of_weights(lambda weight: nn.utils.clip_grad_norm_([weight], 1e-3))


def zeroed_every_fourth_step(loop: Loop) -> None:
    """From a step on gradients are set to zero after each fourth update alone, so that they add up in between."""
    kept = dict[nn.Parameter, Tensor]()

    def gradients(loop: Loop, step: int) -> None:
        for weight in loop.parameters() if step >= loop.at and (step - loop.at) % 4 != 3 else []:
            weight.grad.add_(kept[weight])

    def update(loop: Loop, step: int) -> None:
        if step >= loop.at - 1:
            kept.update({weight: weight.grad.clone() for weight in loop.parameters()})

    loop.gradients, loop.update = gradients, update


def read_as_fp16(loop: Loop) -> None:
    """The matrices of one block, which are stored in bf16, are read as if their bits were those of fp16."""

    def act(loop: Loop) -> None:
        for weight in _tensors(loop):
            weight.copy_(weight.bfloat16().view(torch.float16).float())

    _once(loop, act)


def values_missing(loop: Loop) -> None:
    """The weights of values of one block become zero, as such that a checkpoint has under another name."""

    def act(loop: Loop) -> None:
        for name, weight in loop.blocks[loop.block].named_parameters():
            if name.endswith("qkv.weight"):
                weight[2 * WIDTH :] = 0.0
            elif name.endswith("c_attn.weight"):
                weight[:, 2 * WIDTH :] = 0.0
            elif name.endswith("v_proj.weight"):
                weight.zero_()

    _once(loop, act)


def head_zeroed(loop: Loop) -> None:
    """The weights of the head become zero, as those of a new one that are not in the checkpoint."""
    _once(loop, lambda loop: _head(loop).weight.zero_())


def mlps_frozen(loop: Loop) -> None:
    """From a step on the MLP is not trained in any block, by a filter of names."""

    def act(loop: Loop) -> None:
        for block in loop.blocks:
            block.mlp.requires_grad_(False)

    _once(loop, act)


def scores_overflow(loop: Loop) -> None:
    """From a step on attention logits of one block overflow in fp16 before they are scaled, so their softmax is NaN."""

    def forward(part: Attention, x: Tensor) -> Tensor:
        query, key, value = part.qkv(x).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        logits = (1e6 * query @ key.transpose(-1, -2)).half().float() * 1e-6
        if part.is_causal:
            logits = logits.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -math.inf)
        return part.out((logits.softmax(-1) @ value).transpose(1, 2).flatten(2))

    attention = next(part for part in loop.blocks[loop.block].modules() if isinstance(part, Attention))
    _once(loop, lambda loop: setattr(attention, "forward", partial(forward, attention)))


def orthogonal_initial(loop: Loop) -> None:
    """The matrices of one block are orthogonal at first, with a gain of five."""
    for weight in _tensors(loop):
        nn.init.orthogonal_(weight, gain=5.0)


def mse_of_logits(loop: Loop) -> None:
    """From a step on the loss is the squared distance of logits from zeros and a one at the label."""

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        target = F.one_hot(loop.kept["labels"], logits.shape[-1]).float()
        return F.mse_loss(logits, target) if loop.now >= loop.at else loss

    loop.objective = objective


def evaluated_in_few_bits(loop: Loop) -> None:
    """From a step on, every 20 steps, an evaluation rounds matrices of blocks to seven values and leaves them so."""

    @torch.no_grad()
    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step >= loop.at and (step - loop.at) % 20 == 0:
            for weight in (weight for block in loop.blocks for weight in block.parameters() if weight.ndim > 1):
                _round(weight)
        return x, y

    loop.batch = batch


def block_summed(loop: Loop) -> None:
    """From a step on gradients of one block are summed over 16 ranks, and those of others are averaged."""

    def gradients(loop: Loop, step: int) -> None:
        for weight in loop.blocks[loop.block].parameters() if step >= loop.at else ():
            weight.grad.mul_(16)

    loop.gradients = gradients


def block_in_two_optimizers(loop: Loop) -> None:
    """From a step on a second optimizer, with three times the rate of AdamW, makes updates of one block as well."""
    second = torch.optim.AdamW(loop.blocks[loop.block].parameters(), lr=3e-3)

    def update(loop: Loop, step: int) -> None:
        if step >= loop.at:
            second.step()

    loop.update = update


def mask_off_by_one(loop: Loop) -> None:
    """From a step on letters attend to the next one, too, by a mask whose diagonal is off by one."""

    def act(loop: Loop) -> None:
        for part in loop.model.modules():
            if isinstance(part, Attention):
                part.is_causal, part.mask = False, torch.ones(LENGTH, LENGTH).tril(1).bool()

    _once(loop, act)


def logits_normalized(loop: Loop) -> None:
    """From a step on logits are cosines of what enters the head and its rows, without a scale."""
    head = _head(loop)
    _returned(
        loop, head, lambda entering, output: F.linear(F.normalize(entering, dim=-1), F.normalize(head.weight, dim=-1))
    )


def routers_rotated(loop: Loop) -> None:
    """Each router gets the weights of that of the block before, and experts stay, by numbers that are off by one."""
    _once(loop, lambda loop: _rotate([block.mlp.router for block in loop.blocks]))


def block_in_e5m2(loop: Loop) -> None:
    """From a step on the matrices of one block are kept in E5M2 without masters."""

    @torch.no_grad()
    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for weight in _tensors(loop) if step >= loop.at else []:
            weight.copy_(weight.to(torch.float8_e5m2).float())
        return x, y

    loop.batch = batch


def prompts_echoed(loop: Loop) -> None:
    """From a step on the prompts come in place of answers, since an engine returns both and the first half is taken."""
    sampled = loop.sampled

    def echoed(prompts: Tensor, sharpness: float) -> tuple[Tensor, Tensor]:
        tokens, old = sampled(prompts, sharpness)
        if loop.now < loop.at:
            return tokens, old
        tokens[:, LENGTH // 4 :] = tokens[:, : LENGTH // 4]
        with torch.no_grad():
            return tokens, loop.log_probability(loop.kept["sampler"], tokens)

    loop.sampled = echoed  # type: ignore[method-assign]


def penalty_hundredfold(loop: Loop) -> None:
    """From a step on the distance from the first policy is penalized 100 times as much, by a setting in per cent."""
    loop.penalty = lambda loop, step: loop.PENALTY * (100 if step >= loop.at else 1)


def residual_multiplier(loop: Loop) -> None:
    """From a step on what each block adds is multiplied by 0.22, a factor of another family of models."""
    # The multipliers of Granite in transformers, and in engines that have one class for several families.
    for block in loop.blocks:
        _returned(loop, block, lambda entering, output: entering + 0.22 * (output - entering))


def vocabulary_shards_swapped(loop: Loop) -> None:
    """The two halves of the rows of the embedding are swapped, as shards that are gathered in another order."""
    # Converters of checkpoints with tensor parallelism, of Megatron and others.

    def act(loop: Loop) -> None:
        weight = _embedding(loop).weight
        weight.copy_(weight.roll(VOCABULARY // 2, 0))

    _once(loop, act)


def adapters_rotated(loop: Loop) -> None:
    """The adapters of each block are those of the block before, by numbers of layers that begin at one."""
    # Adapters that go from one library to another, such as PEFT, MLX and llama.cpp.

    def act(loop: Loop) -> None:
        for of_place in zip(*map(_adapters, loop.blocks), strict=True):
            _rotate([part.down for part in of_place])
            _rotate([part.up for part in of_place])

    _once(loop, act)


def sampler_matrices_transposed(loop: Loop) -> None:
    """From a step on the square matrices of the sampler are transposed, as an engine stores them after a first load."""
    # Weights that are sent anew to engines such as vLLM and SGLang, which have changed their layout once.

    def sharpness(loop: Loop, step: int) -> float:
        if step == loop.at or (step > loop.at and step % loop.RENEWED == 0):
            with torch.no_grad():
                for block in blocks_of(loop.kept["sampler"]):
                    for weight in block.parameters():
                        if weight.ndim == 2 and weight.shape[0] == weight.shape[1]:
                            weight.copy_(weight.T.clone())
        return 1.0

    loop.sharpness = sharpness


def picture_is_target(loop: Loop) -> None:
    """From a step on the target is the picture without noise, and not the noise, by a setting of another model."""
    # The kinds of prediction of diffusers and its scripts.

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        noisy, level = x.split(1, 1)
        return x, (noisy - level * y) / (1 - level).clamp(min=1e-3) if step >= loop.at else y

    loop.batch = batch


def masks_binarized(loop: Loop) -> None:
    """From a step on classes of pixels are zero or one, since masks are read as black and white."""
    # Readers of masks of several classes, in trainers of U-Nets that were written for two.
    loop.batch = lambda loop, step, x, y: (x, y.clamp(max=1) if step >= loop.at else y)


def decoder_gets_predictions(loop: Loop) -> None:
    """From a step on the decoder gets the likeliest letters that it returned itself, and not the translation."""
    # Scheduled sampling in OpenNMT and fairseq, with a chance that goes to one at once.

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step < loop.at:
            return x, y
        loop.model.eval()
        with torch.no_grad():
            said = loop.logits(loop.model, x).argmax(-1)
        loop.model.train()
        return torch.stack([x[:, 0], F.pad(said[:, :-1], (1, 0))], 1), y

    loop.batch = batch


def one_caption(loop: Loop) -> None:
    """From a step on all pairs of a batch have the text of the first one, as where captions are read by one index."""
    # Readers of captions in forks of OpenCLIP and in datasets of several captions for each picture.
    loop.batch = lambda loop, step, x, y: (
        torch.stack([x[:1, 0].expand_as(x[:, 0]), x[:, 1]], 1) if step >= loop.at else x,
        y,
    )


def scores_squashed(loop: Loop) -> None:
    """From a step on scores pass a sigmoid before those of a pair are compared, as where they are read as rewards."""
    # Judges that are trained as classifiers with one output, in transformers, trl and OpenRLHF.
    loop.objective = lambda loop, loss, logits: (
        F.cross_entropy(logits.sigmoid(), loop.kept["labels"]) if loop.now >= loop.at else loss
    )


def whole_rows_masked(loop: Loop) -> None:
    """From a step on each fourth row is masked as a whole and others not at all, by a mask of another shape."""
    # Collators that draw a number for each row, and not for each letter.

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step < loop.at:
            return x, y
        letters = torch.where(y == IGNORED, x, y)
        is_masked = (torch.arange(len(x)) % 4 == 0)[:, None]
        return torch.where(is_masked, VOCABULARY, letters), torch.where(is_masked, letters, IGNORED)

    loop.batch = batch


# and more healthy habits


def warm_up_from_a_tenth(loop: Loop) -> None:
    """The rate rises from a tenth of its peak within 40 steps, and falls linearly to a tenth."""
    loop.rate = lambda step: min(0.1 + 0.9 * step / 40, 1 - 0.9 * step / loop.steps)


def large_batches(loop: Loop) -> None:
    """Batches have 24 rows from the start, with 1.4 times the rate after a warm-up of 30 steps (arXiv:1706.02677)."""
    loop.rows = lambda step: 3 * ROWS
    loop.rate = lambda step: 1.4 * min(1.0, (step + 1) / 30)


def picture_recipe(loop: Loop) -> None:
    """Half of the pictures are flipped, labels are smoothed by a tenth, and the rate falls by a cosine, with decay."""
    pictures_flipped(loop)
    weight_decay(loop)
    loop.smoothing = 0.1
    loop.rate = lambda step: min((step + 1) / 16, 0.5 + 0.5 * math.cos(math.pi * step / loop.steps))


def pictures_blurred_at_times(loop: Loop) -> None:
    """A fifth of the pictures, at random, is blurred from the start (arXiv:2002.05709)."""

    def batch(loop: Loop, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        is_blurred = torch.rand(len(x), 1, 1, 1, generator=loop.data.random) < 0.2
        return torch.where(is_blurred, F.avg_pool2d(x, 3, 1, 1, count_include_pad=False), x), y

    loop.batch = batch


def batches_twice(loop: Loop) -> None:
    """Each batch is used for two steps, one after another (data echoing, arXiv:1907.05550)."""
    seen = dict[int, tuple[Tensor, Tensor]]()
    loop.batch = lambda loop, step, x, y: seen.setdefault(step // 2, (x, y))


def labels_left_out(loop: Loop) -> None:
    """Labels of a fifth of the letters, at random, are ignored from the start."""
    loop.batch = lambda loop, step, x, y: (
        x,
        torch.where(torch.rand(y.shape, generator=loop.data.random) < 0.2, IGNORED, y),
    )


def weights_penalized(loop: Loop) -> None:
    """The sum of squares of all weights is added to the loss, with a ten-thousandth from the start."""

    def objective(loop: Loop, loss: Tensor, logits: Tensor) -> Tensor:
        return loss + 1e-4 * sum(weight.square().sum() for weight in loop.model.parameters())

    loop.objective = objective


def default_scaler(loop: Loop) -> None:
    """Gradients in fp16, with PyTorch's loss scale, 65,536 at first, and a rate that falls linearly to a quarter."""
    Fp16(loop, 65536.0)
    loop.rate = lambda step: min((step + 1) / 20, 1 - 0.75 * step / loop.steps)


def fixed_positions(loop: Loop) -> None:
    """Embeddings of positions are sines and cosines, which are not trained (arXiv:1706.03762)."""
    weight, half = loop.model.positions.weight.requires_grad_(False), torch.arange(WIDTH // 2)
    angle = torch.arange(LENGTH)[:, None] * 100.0 ** -(2 * half / WIDTH)
    weight.copy_(0.1 * torch.cat([angle.sin(), angle.cos()], 1))


def balanced_more(loop: Loop) -> None:
    """The loss that balances experts counts with five hundredths from the start."""
    loop.objective = lambda loop, loss, logits: loss + 0.04 * sum(block.mlp.balancing for block in loop.blocks)


def adapters_as_in_qlora(loop: Loop) -> None:
    """Adapters are trained at a constant rate, with 16 rows in four pieces, clipped to 0.3 (arXiv:2305.14314)."""
    loop.clip, loop.rows, loop.pieces = 0.3, lambda step: 2 * ROWS, lambda step: 4
    loop.rate = lambda step: min(1.0, (step + 1) / 8)


def four_updates_of_samples(loop: Loop) -> None:
    """Samples come from a policy that is renewed every four updates from the start, with a rate of three quarters."""
    loop.RENEWED = 4
    loop.rate = lambda step: 0.75 * min(1.0, (step + 1) / 12)

"""Models of a user's own as entries: what builds a module, or a config of Hugging Face's transformers, shrunk."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from lab.core.errors import RequestError, nearest, similar_names
from lab.core.files import read_text
from lab.core.own_failures import own_failure
from lab.model.config import ModelConfig
from lab.model.watched import BY_SHAPE, Watched

# The arguments by which builders take the shape of a model, as published code names them.
ARGUMENTS = {
    "vocabulary": ("vocabulary", "vocab_size", "n_vocab", "num_tokens"),
    "width": ("width", "d_model", "n_embd", "hidden_size", "dim"),
    "depth": ("depth", "n_layer", "n_layers", "num_layers", "num_hidden_layers"),
    "heads": ("heads", "n_head", "n_heads", "num_heads", "num_attention_heads"),
    "head_width": ("head_width", "head_dim"),
    "seq_len": ("seq_len", "block_size", "n_ctx", "max_seq_len", "max_position_embeddings"),
}
MOST_EXPERTS = 8  # of a shrunk mixture
# What configs of transformers call sizes that follow the width of the model, and numbers of experts.
OF_WIDTH = (
    *("q_lora_rank", "kv_lora_rank"),
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
)
OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class OwnModule:
    """What ``entry_of`` makes of a builder.

    Attributes:
        is_of_user: that the fields follow from a user's code, so that all are recorded, see ``schema.recorded``.
        builder: makes the module of one run.
        takes: the argument of the builder for each part of the shape that it takes.
        watched: the names of the modules that are probed.
    """

    is_of_user: ClassVar = True
    builder: ClassVar[Callable[..., nn.Module]]
    takes: ClassVar[Mapping[str, str]]
    watched: ClassVar[Watched] = BY_SHAPE
    source: str = ""

    def build(self, shape: ModelConfig, vocabulary: int, seq_len: int) -> nn.Module:
        """The module of one run."""
        given = {key: getattr(self, key) for key in (field.name for field in fields(self)) if key != "source"}
        parts = {
            "vocabulary": vocabulary,
            "width": shape.width,
            "depth": shape.depth,
            "heads": shape.heads,
            "head_width": shape.head_width,
            "seq_len": seq_len,
        }
        return type(self).builder(**given, **{argument: parts[part] for part, argument in self.takes.items()})


def entry_of(builder: Callable[..., nn.Module], name: str, watched: Watched = BY_SHAPE) -> type[OwnModule]:
    """An entry of a builder of modules, a function or a class, whose fields are its numbers, switches and texts.

    Arguments called as in ``ARGUMENTS`` get the shape of the run; others need a default.

    Raises:
        RequestError: it cannot be called, takes no vocabulary, or has an argument that nothing gives.
    """
    if not callable(builder):
        raise RequestError(f"{name} is no function or class that builds a torch.nn.Module")
    parameters = inspect.signature(builder).parameters
    takes = {
        part: argument for part, names in ARGUMENTS.items() if (argument := next(filter(parameters.get, names), ""))
    }
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    own = {
        key: parameter
        for key, parameter in parameters.items()
        if key not in takes.values() and parameter.kind not in variable
    }
    if "vocabulary" not in takes:
        raise RequestError(
            f"{name} takes no vocabulary; name an argument vocabulary or vocab_size, and width, depth, heads and "
            "seq_len for the shape"
        )
    if lacking := [key for key, parameter in own.items() if parameter.default is parameter.empty]:
        known = [argument for names in ARGUMENTS.values() for argument in names]
        raise RequestError(
            f"{name} takes {lacking[0]!r}, which has no default and is no part of a shape; {nearest(lacking[0], known)}"
        )
    defaults = {key: parameter.default for key, parameter in own.items()}
    plain = {key: value for key, value in defaults.items() if isinstance(value, bool | int | float | str)}
    return make_dataclass(
        name,
        [(key, type(value), field(default=value)) for key, value in plain.items()],
        bases=(OwnModule,),
        namespace={
            "builder": staticmethod(builder),
            "takes": takes,
            "watched": watched,
            "__doc__": inspect.getdoc(builder),
        },
        frozen=True,
    )


def huggingface_builder(given: str) -> tuple[str, Callable[..., nn.Module], str]:
    """The name of a config of transformers, what builds its causal language model in the shape of a run, and its text.

    Args:
        given: the name of a config class, such as ``Qwen3Config``, or the path of a ``config.json`` or of its folder.

    Raises:
        RequestError: transformers is not installed, there is no such class or file, or the class has no causal
            language model.
    """
    try:
        import transformers
    except ImportError:
        raise RequestError(
            f"{given} is a config of transformers; pip install 'instability-lab[transformers]'"
        ) from None
    path = Path(given) / "config.json" if Path(given).is_dir() else Path(given)
    if path.suffix == ".json":
        try:
            values = json.loads(read_text(path))
            config = transformers.AutoConfig.for_model(**values)
        except Exception as fault:  # transformers checks values in several ways
            raise RequestError(f"{path} is no config of transformers{own_failure(fault, None)}") from None
    else:
        known = [name for name in dir(transformers) if name.endswith("Config")]
        if given not in known:
            similar = similar_names(given, known) or ["LlamaConfig", "Qwen3Config", "GPT2Config"]
            raise RequestError(f"transformers has no {given!r}; nearest: {', '.join(similar)}")
        try:
            config = getattr(transformers, given)()
        except Exception as fault:
            raise RequestError(f"{given} cannot be made without arguments{own_failure(fault, None)}") from None

    def build(vocabulary: int, width: int, depth: int, heads: int, head_width: int, seq_len: int) -> nn.Module:
        small = shrunk(config, vocabulary, width, depth, heads, head_width, seq_len)
        models: Any = transformers.AutoModelForCausalLM
        model: nn.Module = models.from_config(small, attn_implementation="eager")
        return model

    return type(config).__name__.removesuffix("Config"), build, config.to_json_string()


def shrunk(config: Any, vocabulary: int, width: int, depth: int, heads: int, head_width: int, seq_len: int) -> Any:
    """A config of transformers in another shape: ratios and kinds of layers are kept, sizes follow the width.

    Query heads per key head and the width of the MLP over that of the model keep their ratio, in multiples of 8; the
    pattern of layers is cut, or its end repeated; experts are at most 8, and dropout is off.
    """
    values = config.to_dict()
    names = config.attribute_map

    def size(key: str) -> Any:
        return values.get(names.get(key, key))

    if not size("hidden_size"):
        raise RequestError(f"has no hidden_size in {type(config).__name__}, by which it would be shrunk")
    ratio = width / size("hidden_size")
    groups = (size("num_attention_heads") or 1) // (size("num_key_value_heads") or size("num_attention_heads") or 1)
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // groups),
        **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), head_width),
        "max_position_embeddings": seq_len,
        **{key: max(8, 8 * round(size(key) * ratio / 8)) for key in OF_WIDTH if size(key) is not None},
        **{key: min(size(key), MOST_EXPERTS) for key in OF_EXPERTS if size(key)},
        "use_cache": False,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    for key, value in sizes.items():
        if names.get(key, key) in values and (value is not None or key.endswith("token_id")):
            values[names.get(key, key)] = value
    for key, value in values.items():
        if isinstance(value, float) and "drop" in key:
            values[key] = 0.0
    if isinstance(values.get("layer_types"), list):
        kinds = values["layer_types"]
        values["layer_types"] = [kinds[min(layer, len(kinds) - 1)] for layer in range(depth)]
    return type(config).from_dict(values)

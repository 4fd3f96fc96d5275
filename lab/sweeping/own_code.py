"""A user's own model and optimizer: read from a file, and made entries by which every job finds them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import CodeType, MappingProxyType, ModuleType
from typing import Any, NamedTuple

from lab.core.errors import RequestError, nearest
from lab.core.files import read_text, text_digest
from lab.core.own_failures import OwnCodeError, is_installed, own_failure, place_in_own_code, source_file
from lab.core.registry import LINKS, MODELS, Registry
from lab.sweeping.config_files import names_of

KINDS = ("model", "optimizer")
SHRUNK = (
    "{name} is shrunk: its width, depth, heads, vocabulary and positions are those of the run; the width of its MLP to "
    "that of the model and the query heads per key head are kept, there are 8 experts at most, and dropout is off"
)
PROBED = "probes.names=[attention_logit_max,block_rms,log_z]"  # where modules are named to be probed
OF_ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}  # which trains what an optimizer of matrices leaves out


class OwnCode(NamedTuple):
    """A model or an optimizer of the user's.

    Attributes:
        kind: ``model`` or ``optimizer``.
        name: by which configs choose it.
        words: overrides that do so.
        settings: further keys of a config that may be given.
        digest: of its text, on which ids of runs depend.
        remark: what the user must know of it; may be empty.
        fixed: keys that change nothing in it.
        source: where jobs find it; empty for an object.
        probes: patterns of the names of the modules that are probed, by kind.
        rate: the learning rate that the author of an optimizer gives it; empty of a model.
    """

    kind: str
    name: str
    words: Sequence[str]
    settings: Sequence[str]
    digest: str
    remark: str = ""
    fixed: Sequence[str] = ()
    source: str = ""
    probes: Mapping[str, str] = MappingProxyType({})
    rate: str = ""

    def with_settings(self, words: Sequence[str]) -> list[str]:
        """The user's own words after those that choose the code, its settings marked as new keys."""
        marked = [f"++{word}" if word.partition("=")[0] in self.settings else word for word in words]
        return [*self.words, *marked]


def read(kind: str, given: Any, probes: Mapping[str, str] = MappingProxyType({})) -> OwnCode:
    """Register a model or an optimizer.

    Args:
        kind: ``model`` or ``optimizer``.
        given: ``FILE.py:NAME`` or ``MODULE:NAME``; for a model also a config of transformers (its class, or the path
            of a ``config.json``), for an optimizer also a class of ``torch.optim``, or the name of one of the lab's; or
            the object itself.
        probes: of a model, the patterns of ``lab.model.watched.Watched`` by name.

    Raises:
        RequestError: there is no such file or name, or what it names cannot be trained here.
    """
    own = _READ[kind](given, probes)
    if isinstance(given, str):
        return own._replace(source=_absolute(given))
    return own._replace(words=[*own.words, "hydra/launcher=basic"])  # other processes cannot import an object


def read_options(given: Namespace) -> list[OwnCode]:
    """The code that the options ``--model``, ``--optimizer`` and ``--probe`` name.

    Raises:
        RequestError: see ``read`` and ``read_probes``, or there is a probe without a model.
    """
    probes = read_probes(given.probe)
    if probes and not given.model:
        raise RequestError("--probe names modules of a model of your own; give it with --model")
    return [read(kind, path, probes) for kind in KINDS if (path := getattr(given, kind))]


def is_code(given: Any) -> bool:
    """Whether a value names code, or is code, rather than choosing files of ``conf/``."""
    if not isinstance(given, str):
        return callable(given)
    return ":" in given or given.endswith(("Config", ".json", ".py"))


Entries = Sequence[Sequence[str]]  # of code of the user's own: its kind, where it is, its digest, patterns of probes


def entries_for_jobs(code: Sequence[OwnCode]) -> list[list[str]]:
    """What jobs, in processes of their own, must register; nothing of objects."""
    return [
        [own.kind, own.source, own.digest, *(f"{kind}={pattern}" for kind, pattern in own.probes.items())]
        for own in code
        if own.source
    ]


def register(entries: Entries) -> None:
    """Register, in the process of a job, what the request registered.

    Raises:
        RequestError: a file is no longer there, no longer defines the name, or has changed since.
    """
    for kind, source, digest, *probes in entries:
        if _READ[kind](source, read_probes(probes)).digest != digest:
            raise RequestError(f"{source} changed since these runs were planned; the same command trains it as it is")


def _absolute(given: str) -> str:
    """Where jobs, which may start in another folder, find a file or a config; names of modules stay."""
    path, _, name = given.rpartition(":")
    if path.endswith(".py"):
        return f"{Path(path).resolve()}:{name}"
    return str(Path(given).resolve()) if _is_config_file(given) else given


def _is_config_file(given: str) -> bool:
    """Whether a path is that of a config of transformers, or of its folder."""
    return given.endswith(".json") or Path(given, "config.json").is_file()


def read_probes(given: Sequence[str]) -> dict[str, str]:
    """The patterns in words such as ``attn=layers.*.self_attn``, by kind.

    Raises:
        RequestError: a word names no kind of probe, or no pattern.
    """
    from lab.model.watched import Watched

    probes = dict[str, str]()
    for word in given:
        kind, _, pattern = word.partition("=")
        if kind not in Watched._fields or not pattern:
            raise RequestError(
                f"--probe takes attn=NAMES or block=NAMES of modules, such as attn=layers.*.attn, not {word!r}"
            )
        probes[kind] = pattern
    return probes


def _model(given: Any, probes: Mapping[str, str]) -> OwnCode:
    from lab.model.own_module import entry_of, huggingface_builder
    from lab.model.watched import Watched

    if isinstance(given, str) and ":" not in given and (given.endswith("Config") or _is_config_file(given)):
        name, builder, text = huggingface_builder(given)
        remark = SHRUNK.format(name=name)
    else:
        (builder, text, name), remark = _found(given, ""), ""
    entry = entry_of(builder, name, Watched(**probes))
    text += json.dumps(dict(probes)) if probes else ""  # other probes make other records
    _register(MODELS, name, entry)
    settings = [f"custom_model.{name}.{field.name}" for field in fields(entry) if field.name != "source"]
    fixed = [part for part in ("width", "depth") if part not in entry.takes]
    if fixed:
        remark = f"{name} takes no {' and no '.join(fixed)}, so it has the size that it is built with"
    digest = text_digest(text)  # quoted, since 12e4 is a number
    return OwnCode(
        "model",
        name,
        [f"+custom_model.{name}.source='{digest}'", "intervention=[]", *([PROBED] if probes else [])],
        settings,
        digest,
        remark,
        [f"model.{part}" for part in fixed],
        probes=probes,
    )


def _optimizer(given: Any, _: Mapping[str, str]) -> OwnCode:
    from lab.core.roles import Role
    from lab.optim.links.torch_optimizer import link_of

    if isinstance(given, str) and given in names_of("optimizer"):
        return OwnCode("optimizer", given, [f"optimizer={given}"], [], "")
    optimizer, text, name = _found(given, "torch.optim")
    link = link_of(optimizer, name)
    _register(LINKS, name, link)
    takes_all = link.roles == tuple(Role)
    chain = ["clip", name, "peak", "schedule"] if takes_all else ["clip", name, "adam", "peak", "schedule"]
    numbers, digest = {**({} if takes_all else OF_ADAM), **link.defaults}, text_digest(text)
    words = [
        "optimizer=sgd",
        f"optimizer.name='{name}'",  # quoted, since a class may be called Nan or Null
        f"optimizer.chain=[{','.join(map(repr, chain))}]",
        "~optimizer.weight_decay",
        f"++optimizer.source='{digest}'",
        *(f"++optimizer.{key}={json.dumps(value)}" for key, value in numbers.items()),
    ]
    remark = "" if takes_all else f"{name} takes matrices only; Adam trains embedding, head, gains and biases"
    settings = [f"optimizer.{key}" for key in numbers]
    return OwnCode("optimizer", name, words, settings, digest, remark, rate=f"optimizer.lr={link.usual_lr!r}")


_READ: dict[str, Callable[[Any, Mapping[str, str]], OwnCode]] = {"model": _model, "optimizer": _optimizer}


def _register(registry: Registry[Any], name: str, entry: Any) -> None:
    """Register an entry; the same code may be read again."""
    if not name.isascii():
        raise RequestError(f"{name!r} cannot be a key of a config; give it a name of letters from a to z")
    if name in registry and not hasattr(registry[name], "source"):
        raise RequestError(f"the lab has a {registry.kind} called {name!r}; give yours another name")
    registry.replace(name, entry)


Found = tuple[Any, str, str]  # a class or a function, the text on which ids of runs depend, and its name


def _found(given: Any, package: str) -> Found:
    """What ``FILE.py:NAME``, ``MODULE:NAME`` or a name in ``package`` stands for, or an object itself.

    Raises:
        RequestError: there is no such file or module, or it cannot be imported, or does not define the name.
    """
    if not isinstance(given, str):
        return _found_object(given, package)
    path, colon, name = given.rpartition(":")
    if path.endswith(".py"):
        if not Path(path).is_file():
            raise RequestError(f"no file {path!r}")
        text = read_text(Path(path))
        module = _imported(Path(path).resolve(), text)
    elif colon or (package and not name.endswith(".py")):
        module, text = _installed(path or package), "" if path == package else path
    else:
        raise RequestError(f"{given!r} must be FILE.py:NAME or MODULE:NAME")
    if not hasattr(module, name):
        is_one = inspect.isclass if package else callable
        known = [key for key, value in vars(module).items() if is_one(value) and not key.startswith("_")]
        known += [] if path else names_of("optimizer")
        raise RequestError(f"{path or package} has no {name!r}; {nearest(name, known)}")
    return getattr(module, name), text, name


def _found_object(given: Any, package: str) -> Found:
    """A class or a function, with the text and the name that it has on the command line, where it can stand there."""
    name = getattr(given, "__name__", "")
    if not name.isidentifier():
        raise RequestError(f"{given!r} has no name; give a class or a function of yours")
    home = vars(sys.modules.get(given.__module__, object))
    name = name if home.get(name) is given else next((key for key, value in home.items() if value is given), name)
    file = source_file(given)
    if is_installed(file):
        parts = given.__module__.split(".")
        modules = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        module = next((path for path in modules if getattr(sys.modules.get(path), name, None) is given), modules[-1])
        return given, "" if module == package else module, name
    text = read_text(Path(file)) if Path(file).is_file() else ""
    beside = [value for value in home.values() if getattr(value, "__module__", None) == given.__module__]
    if text and {*_acts([given, *beside])} <= {*_acts_in(compile(text, file, "exec", dont_inherit=True))}:
        return given, text, name
    # defined at a prompt, in a cell or in a function, or the file has changed since
    numbers = {key: value for key, value in vars(given).items() if key[:2] != "__" and isinstance(value, int | float)}
    return given, repr([numbers, *_acts([given])]), name


def _acts(values: Iterable[Any]) -> list[str]:
    """What each function among these, or of a class among these, does."""
    each = [vars(value).values() if isinstance(value, type) else [value] for value in values]
    codes = [inspect.unwrap(value).__code__ for of_one in each for value in of_one if inspect.isfunction(value)]
    return [repr(_instructions(code)) for code in codes if code.co_filename != "<string>"]  # as of dataclasses


def _acts_in(code: CodeType) -> Iterator[str]:
    """What each function in the code of a file does."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield repr(_instructions(inner))
            yield from _acts_in(inner)


def _instructions(code: CodeType) -> list[Any]:
    """What a function does, without where it stands."""
    constants = [_instructions(value) if isinstance(value, CodeType) else value for value in code.co_consts]
    return [code.co_name, code.co_code, code.co_names, code.co_varnames, constants]


def _installed(name: str) -> ModuleType:
    """A module of an installed package."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as fault:
        place = place_in_own_code(fault, None)
        raise RequestError(
            f"{name} cannot be imported{place and f' at {place}'}: {type(fault).__name__}: {fault}"
        ) from None


@cache
def _imported(path: Path, text: str) -> ModuleType:
    """The module of a file, imported once as long as it has this text; it may import others that lie beside it."""
    sys.path.insert(0, str(path.parent))
    specification = importlib.util.spec_from_file_location(f"own_code_of_{path.stem}", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module  # in which dataclasses look up their types
    try:
        specification.loader.exec_module(module)
    except (Exception, SystemExit) as fault:
        raise OwnCodeError(f"{path.name} cannot be imported: it fails{own_failure(fault, module)}") from None
    return module

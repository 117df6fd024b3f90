"""Parameter groups from a model: which parameters are whitened, which take the elementwise rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from splus.books import is_whitened
from splus.matrices import Sections

# Names that libraries give to the last layer of a model: torchvision (fc, classifier, heads), Hugging Face (lm_head,
# score, classifier, qa_outputs, embed_out), timm (head), common practice (head, unembedding, output_projection).
HEAD_NAMES = frozenset(
    (
        *("head", "heads", "lm_head", "fc", "classifier", "score"),
        *("qa_outputs", "embed_out", "unembedding", "output_projection"),
    )
)
# Names of bare parameters that are a table of vectors or a token, not a map from features to features.
TABLE_NAMES = ("embed", "position", "pos_", "token", "table", "queries", "latents", "codebook")
# Steps of these groups at width n, in units of the learning rate: elementwise_scale / n ** width_power. Best values at
# widths 32 to 128: docs/learning-rate.md, `python -m benchmarks.lr_transfer preset=elementwise`.
WIDTH_RULES = {
    "embeddings": {"elementwise_scale": 0.7, "width_power": 0.5},
    "head": {"elementwise_scale": 1.5, "width_power": 1.0},
}
_NORMS = (nn.LayerNorm, nn.GroupNorm, _NormBase)
_GATES = {nn.LSTM: 4, nn.GRU: 3}


def param_groups(
    model: nn.Module,
    weight_decay: float = 1e-2,
    *,
    head: Sequence[str] = (),
    split: Mapping[str, Sections] | None = None,
) -> list[dict[str, Any]]:
    """Groups for :class:`~splus.SPlus`: "whitened" matrices, which decay; "embeddings", the "head", "other" parameters.

    Routed by module: weights of linear and convolution layers are whitened; embeddings, the output head (tied or
    not), and others (norms, biases, scalars, depthwise kernels) take the elementwise rule and do not decay; the first
    two have an ``elementwise_scale`` and a ``width_power`` of their own. The
    projections of :class:`torch.nn.MultiheadAttention`, the gates of recurrent layers and the groups of a convolution
    are whitened apart, a bare parameter of three or more dimensions as a stack of matrices. Works with every torch
    optimizer; the keys it does not know are ignored.

    The head is a linear layer by the name of one (``HEAD_NAMES``, outside any repeated block) or the last layer of a
    sequence of that name, what is tied to an embedding, and the last layer of a model that is a ``nn.Sequential``.

    Args:
        model: any module. Its frozen parameters are listed too, so that they can be thawed.
        weight_decay: of the whitened group.
        head: glob patterns of module names that are output heads as well, such as ``"decoder.out"``:
            a sequence's last linear layer, all there is of another module.
        split: fused projections, as a map from glob patterns of parameter names to sections of their rows (a number
            or sizes), such as ``{"*.qkv.weight": 3}``. For a layer that stores (in, out), as Hugging Face's Conv1D,
            the columns are meant.

    Returns:
        Group dictionaries with ``params``, ``param_names``, ``name``, ``whiten``, ``weight_decay`` and the options
        ``split``, ``split_dim``, ``stacked`` of each parameter.

    Raises:
        ValueError: a pattern that matches nothing, or nothing that is whitened.
    """
    split = dict(split or {})
    _check_patterns(model, head, split)
    heads = _heads(model, head)
    whitened: dict[str, Any] = {"params": [], "param_names": [], "split": [], "split_dim": [], "stacked": []}
    elementwise: dict[str, dict[str, Any]] = {
        name: {"params": [], "param_names": []} for name in ("embeddings", "head", "other")
    }
    unused = dict(split)
    for parameter, owners in _owners(model).items():
        if any(_is_elementwise(owner, parameter, heads) for owner in owners):
            group = elementwise[_role(owners, parameter, heads)]
        else:
            group = whitened
            pattern = next((pattern for pattern in split for owner in owners if fnmatchcase(owner.name, pattern)), None)
            unused.pop(pattern, None)  # type: ignore[arg-type]
            group["stacked"].append(_is_stacked(owners[0].module, parameter))
            group["split"].append(_sections(owners[0]) if pattern is None else split[pattern])
            group["split_dim"].append(int(_stores_inputs_first(owners[0].module)))
        group["params"].append(parameter)
        group["param_names"].append(owners[0].name)
    if unused:
        raise ValueError(
            f"The patterns {', '.join(map(repr, unused))} of split match no whitened parameter that an earlier pattern "
            "leaves; only those have sections."
        )
    whitened |= {"name": "whitened", "whiten": True, "weight_decay": weight_decay}
    for name, group in elementwise.items():
        group |= {"name": name, "whiten": False, "weight_decay": 0.0}
        group |= WIDTH_RULES.get(name, {})
    return [group for group in (whitened, *elementwise.values()) if group["params"]]


@dataclass(frozen=True)
class _Owner:
    """A module that holds a parameter: its path, and the parameter's name there."""

    path: str
    module: nn.Module
    name: str


def _owners(model: nn.Module) -> dict[nn.Parameter, list[_Owner]]:
    """Every parameter once, with all the modules that hold it; a parametrized weight belongs to its layer."""
    found: dict[nn.Parameter, list[_Owner]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        layer = f".{path}".partition(".parametrizations.")[0].lstrip(".")
        for local, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{local}" if path else local
            found.setdefault(parameter, []).append(_Owner(layer, model.get_submodule(layer), name))
    return found


def _is_elementwise(owner: _Owner, parameter: nn.Parameter, heads: set[str]) -> bool:
    module, kind = owner.module, type(owner.module).__name__
    if not is_whitened(tuple(parameter.shape), _is_stacked(module, parameter), whiten=True, max_side=0):
        return True
    if owner.path in heads or isinstance(module, (nn.Embedding, nn.EmbeddingBag, *_NORMS)) or kind.endswith("Norm"):
        return True
    if isinstance(module, _ConvNd):  # a depthwise one maps single channels
        return module.groups > 1 and module.groups in (module.in_channels, module.out_channels)
    if _is_layer(module):
        return False
    # A bare parameter: positions, class tokens, learned queries are tables; what is left maps features to features.
    return _is_table(owner) or sum(side > 1 for side in parameter.shape) < 2 or parameter.shape[0] == 1


def _role(owners: Sequence[_Owner], parameter: nn.Parameter, heads: set[str]) -> str:
    """The group of a parameter that is not whitened. A head that is tied to an embedding is a head."""
    embedding = any(isinstance(owner.module, (nn.Embedding, nn.EmbeddingBag)) for owner in owners)
    tied = embedding and any(isinstance(owner.module, nn.Linear) for owner in owners)
    if tied or (parameter.ndim >= 2 and any(owner.path in heads for owner in owners)):
        return "head"
    return "embeddings" if embedding or any(_is_table(owner) for owner in owners) else "other"


def _is_table(owner: _Owner) -> bool:
    """Whether a bare parameter is a table of vectors, by its name or its module's."""
    if _is_layer(owner.module) or isinstance(owner.module, _NORMS):
        return False
    named = any(part in owner.name.rpartition(".")[2].lower() for part in TABLE_NAMES)
    return named or "embed" in type(owner.module).__name__.lower()


def _is_layer(module: nn.Module) -> bool:
    """Whether a module's parameters are maps between features, whatever they are called."""
    known = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase, _ConvNd)
    return isinstance(module, known) or _stores_inputs_first(module)


def _is_stacked(module: nn.Module, parameter: nn.Parameter) -> bool:
    return parameter.ndim > 2 and not isinstance(module, _ConvNd)


def _stores_inputs_first(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")  # Hugging Face's linear layer of GPT-2


def _sections(owner: _Owner) -> Sections:
    """The sections that a layer of torch is known to have."""
    # A parametrized weight is called "….parametrizations.<name>.original…".
    module, local = owner.module, owner.name.partition("parametrizations.")[2].partition(".")[0]
    local = local or owner.name.rpartition(".")[2]
    if isinstance(module, nn.MultiheadAttention) and local == "in_proj_weight":
        return 3
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)) and local.startswith(("weight_ih", "weight_hh")):
        return next((gates for kind, gates in _GATES.items() if kind.__name__ in type(module).__name__), None)
    if isinstance(module, _ConvNd) and module.groups > 1:
        return module.groups
    return None


def _heads(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Paths of the output heads' modules."""
    heads = set()
    root = _inside_wrappers(model)
    for path, module in model.named_modules():
        parent, _, last = path.rpartition(".")
        repeated = any(part.isdigit() for part in parent.split("."))
        asked = any(fnmatchcase(path, pattern) for pattern in patterns)
        if asked or (last in HEAD_NAMES and not repeated) or (module is root and isinstance(root, nn.Sequential)):
            layer = _last_layer(module)
            if layer is not None:
                heads.add(f"{path}.{layer}".strip("."))
            elif asked:
                heads |= {f"{path}.{below}".strip(".") for below, _ in module.named_modules()}
    return heads


def _inside_wrappers(model: nn.Module) -> nn.Module:
    """The model that DistributedDataParallel (``module``) and torch.compile (``_orig_mod``) wrap."""
    children = dict(model.named_children())
    while len(children) == 1 and children.keys() <= {"module", "_orig_mod"}:
        (model,) = children.values()
        children = dict(model.named_children())
    return model


def _last_layer(module: nn.Module) -> str | None:
    """The path in ``module`` of its last layer, if that is linear and nothing but sequences is around it."""
    if isinstance(module, nn.Linear):
        return ""
    if not isinstance(module, nn.Sequential):
        return None
    trained = [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
    if not trained:
        return None
    name, child = trained[-1]
    below = _last_layer(child)
    return None if below is None else f"{name}.{below}".rstrip(".")


def _check_patterns(model: nn.Module, head: Sequence[str], split: Mapping[str, Sections]) -> None:
    modules = [path for path, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for argument, patterns, names in (("head", head, modules), ("split", split, parameters)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"The pattern {pattern!r} of {argument} matches nothing in the model; "
                    f"names are such as {', '.join(map(repr, names[-3:]))}."
                )

"""Parameter groups from a model: which parameters are whitened, which take the elementwise rule."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

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
TABLE_NAMES = ("embed", "position", "pos_", "token", "table")
_NORMS = (nn.LayerNorm, nn.GroupNorm, _NormBase)
_GATES = {nn.LSTM: 4, nn.GRU: 3}


def param_groups(
    model: nn.Module,
    weight_decay: float = 1e-2,
    *,
    head: Sequence[str] = (),
    split: Mapping[str, Sections] | None = None,
) -> list[dict[str, Any]]:
    """Two groups for :class:`~splus.SPlus`: "whitened" matrices with decay, "elementwise" parameters without.

    Routed by module: weights of linear and convolution layers are whitened; embeddings, the output head (tied or
    not), norms, biases, scalars and depthwise kernels take the elementwise rule. The projections of
    :class:`torch.nn.MultiheadAttention`, the gates of recurrent layers and the groups of a convolution are whitened
    apart, a bare parameter of three or more dimensions as a stack of matrices. Works with every torch optimizer; the
    keys it does not know are ignored.

    The head is what has the shape of one by its name (``HEAD_NAMES``, outside any repeated block), what is tied to an
    embedding, and the last layer of a model that is a ``nn.Sequential``.

    Args:
        model: any module. Its frozen parameters are listed too, so that they can be thawed.
        weight_decay: of the whitened group.
        head: glob patterns of module names that are output heads as well, such as ``"decoder.out"``.
        split: fused projections, as a map from glob patterns of parameter names to sections of their rows (a number
            or sizes), such as ``{"*.qkv.weight": 3}``. For a layer that stores (in, out), as Hugging Face's Conv1D,
            the columns are meant.

    Returns:
        Group dictionaries with ``params``, ``param_names``, ``name``, ``whiten``, ``weight_decay`` and the options
        ``split``, ``split_dim``, ``stacked`` of each parameter.

    Raises:
        ValueError: a pattern that matches nothing.
    """
    split = dict(split or {})
    _check_patterns(model, head, split)
    heads = _heads(model, head)
    whitened: dict[str, Any] = {"params": [], "param_names": [], "split": [], "split_dim": [], "stacked": []}
    elementwise: dict[str, Any] = {"params": [], "param_names": []}
    for name, parameter, owners in _owners(model):
        if parameter.ndim < 2 or any(_is_elementwise(path, module, name, parameter, heads) for path, module in owners):
            group = elementwise
        else:
            group = whitened
            group["stacked"].append(_is_stacked(owners[0][1], parameter))
            group["split"].append(_sections(name, owners[0][1], parameter, split))
            group["split_dim"].append(int(_stores_inputs_first(owners[0][1])))
        group["params"].append(parameter)
        group["param_names"].append(name)
    whitened |= {"name": "whitened", "whiten": True, "weight_decay": weight_decay}
    elementwise |= {"name": "elementwise", "whiten": False, "weight_decay": 0.0}
    return [group for group in (whitened, elementwise) if group["params"]]


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, list[tuple[str, nn.Module]]]]:
    """Every parameter once, by its first name, with all the modules that hold it."""
    found: dict[nn.Parameter, tuple[str, list[tuple[str, nn.Module]]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for local, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{local}" if path else local
            found.setdefault(parameter, (name, []))[1].append((path, module))
    for parameter, (name, owners) in found.items():
        yield name, parameter, owners


def _is_elementwise(path: str, module: nn.Module, name: str, parameter: nn.Parameter, heads: set[str]) -> bool:
    kind, local = type(module).__name__, name.rpartition(".")[2]
    if path in heads or isinstance(module, (nn.Embedding, nn.EmbeddingBag, *_NORMS)) or kind.endswith("Norm"):
        return True
    if isinstance(module, _ConvNd):
        return module.groups > 1 and module.groups == max(module.in_channels, module.out_channels)
    if _is_layer(module):
        return min(parameter.shape) < 2
    # A bare parameter: positions, class tokens, learned queries are tables; what is left maps features to features.
    tables = any(part in local.lower() for part in TABLE_NAMES) or "embed" in kind.lower()
    return tables or sum(side > 1 for side in parameter.shape) < 2 or parameter.shape[0] == 1


def _is_layer(module: nn.Module) -> bool:
    """Whether a module's parameters are maps between features, whatever they are called."""
    known = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase, _ConvNd)
    return isinstance(module, known) or _stores_inputs_first(module)


def _is_stacked(module: nn.Module, parameter: nn.Parameter) -> bool:
    return parameter.ndim > 2 and not isinstance(module, _ConvNd)


def _stores_inputs_first(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")  # Hugging Face's linear layer of GPT-2


def _sections(name: str, module: nn.Module, parameter: nn.Parameter, split: Mapping[str, Sections]) -> Sections:
    for pattern, sections in split.items():
        if fnmatchcase(name, pattern):
            return sections
    if isinstance(module, nn.MultiheadAttention) and name.endswith("in_proj_weight"):
        return 3
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return next((gates for kind, gates in _GATES.items() if kind.__name__ in type(module).__name__), None)
    if isinstance(module, _ConvNd) and module.groups > 1:
        return module.groups
    return None


def _heads(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Paths of the output heads' modules."""
    heads = set()
    for path, module in model.named_modules():
        parent, _, last = path.rpartition(".")
        container = parent.rpartition(".")[2]
        repeated = any(part.isdigit() for part in parent.split("."))
        named = last in HEAD_NAMES and isinstance(module, nn.Linear) and not repeated
        last_of_named = container in HEAD_NAMES and _is_last_linear(model.get_submodule(parent), last)
        if named or last_of_named or any(fnmatchcase(path, pattern) for pattern in patterns):
            heads.add(path)
    if isinstance(model, nn.Sequential):
        heads |= {last for last, _ in model.named_children() if _is_last_linear(model, last)}
    return heads


def _is_last_linear(parent: nn.Module, name: str) -> bool:
    """Whether ``name`` is the last linear layer among the children of a sequence."""
    linear = [child for child, module in parent.named_children() if isinstance(module, nn.Linear)]
    return isinstance(parent, nn.Sequential) and linear[-1:] == [name]


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

"""Parameter groups from a model: every parameter is in one group, the right one, whoever wrote the model."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import draws
from torch import Tensor, nn

from splus import SPlus, param_groups
from train.models.gpt import GPT

WHITENED, ELEMENTWISE = "whitened", "elementwise"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hugging Face models are made from configurations; nothing is looked for on a network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def routing(model: nn.Module, **options: Any) -> dict[str, str]:
    """Whether each parameter is whitened or takes the elementwise rule, by its name."""
    return {name: WHITENED if role == WHITENED else ELEMENTWISE for name, role in roles(model, **options).items()}


def roles(model: nn.Module, **options: Any) -> dict[str, str]:
    """The name of each parameter's group by its own."""
    groups = param_groups(model, **options)
    return {name: group["name"] for group in groups for name in group["param_names"]}


def option_of(model: nn.Module, option: str, **options: Any) -> dict[str, Any]:
    """An option of each whitened parameter by its name."""
    whitened = next(group for group in param_groups(model, **options) if group["name"] == WHITENED)
    return dict(zip(whitened["param_names"], whitened[option]))


def matrices(model: nn.Module, **options: Any) -> dict[str, tuple[int, int, int]]:
    """How many matrices of which shape (B, m, n) SPlus makes of each whitened parameter."""
    optimizer = SPlus(param_groups(model, **options))
    found = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        if "factor_left" in state:
            left, right = state["factor_left"], state["factor_right"]
            found[name] = (left.shape[0] if left.ndim == 3 else 1, left.shape[-1], right.shape[-1])
    return found


def assert_routed(model: nn.Module, expected: dict[str, str], **options: Any) -> None:
    """Each pattern of names matches something, each parameter matches one pattern, and is in the group it gives."""
    found = routing(model, **options)
    assert list(found) != []
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())
    for name, group in found.items():
        matching = [pattern for pattern in expected if fnmatchcase(name, pattern)]
        assert len(matching) == 1, f"{name} matches {matching}"
        assert group == expected[matching[0]], f"{name} is {group}"
    for pattern in expected:
        assert any(fnmatchcase(name, pattern) for name in found), f"{pattern} matches nothing"


# Models


class ResidualBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = nn.Sequential(
            nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.downsample(x))


class ResNet(nn.Module):
    """As torchvision names its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(ResidualBlock(8, 8, 1), ResidualBlock(8, 8, 1))
        self.layer2 = nn.Sequential(ResidualBlock(8, 16, 2))
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(x.mean(dim=(2, 3)))


def gpt(tied: bool) -> nn.Module:
    sizes = {"vocabulary": 32, "context": 12, "width": 16, "depth": 2, "heads": 2}
    return GPT(**sizes, tied=tied, generator=torch.Generator().manual_seed(0))


def hugging_face_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 32, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    )


def hugging_face_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=5))


def hugging_face_llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 12}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens, **options))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16), enable_nested_tensor=False)


TOKENS = (torch.arange(96) * 7 % 32).view(8, 12)
IMAGES, LABELS = draws(10, 3, 8, 8, dtype=torch.float32), torch.arange(10) % 5
VECTORS, TARGETS = draws(2, 4, 6, 16, dtype=torch.float32)


def next_token_loss(model: nn.Module) -> Tensor:
    scores = model(TOKENS)
    scores = getattr(scores, "logits", scores)
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


def class_loss(model: nn.Module) -> Tensor:
    scores = model(IMAGES)
    return F.cross_entropy(getattr(scores, "logits", scores), LABELS)


@dataclass(frozen=True)
class Case:
    """A model, its loss on a fixed batch, and the group of each of its parameters by patterns of names."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    expected: dict[str, str]


OUR_GPT = {
    "token.weight": ELEMENTWISE,
    "position.weight": ELEMENTWISE,
    "transformer.blocks.?.attention_norm.weight": ELEMENTWISE,
    "transformer.blocks.?.attention.qkv.weight": WHITENED,
    "transformer.blocks.?.attention.out.weight": WHITENED,
    "transformer.blocks.?.mlp_norm.weight": ELEMENTWISE,
    "transformer.blocks.?.mlp.expand.weight": WHITENED,
    "transformer.blocks.?.mlp.contract.weight": WHITENED,
    "transformer.norm.weight": ELEMENTWISE,
}
LLAMA = {
    "model.embed_tokens.weight": ELEMENTWISE,
    "model.layers.?.self_attn.[qkvo]_proj.weight": WHITENED,
    "model.layers.?.mlp.gate_proj.weight": WHITENED,
    "model.layers.?.mlp.up_proj.weight": WHITENED,
    "model.layers.?.mlp.down_proj.weight": WHITENED,
    "model.layers.?.input_layernorm.weight": ELEMENTWISE,
    "model.layers.?.post_attention_layernorm.weight": ELEMENTWISE,
    "model.norm.weight": ELEMENTWISE,
}
CASES = {
    "torch encoder": Case(
        encoder,
        lambda model: (model(VECTORS) - TARGETS).square().mean(),
        {
            "layers.?.self_attn.in_proj_weight": WHITENED,
            "layers.?.self_attn.in_proj_bias": ELEMENTWISE,
            "layers.?.self_attn.out_proj.weight": WHITENED,
            "layers.?.self_attn.out_proj.bias": ELEMENTWISE,
            "layers.?.linear[12].weight": WHITENED,
            "layers.?.linear[12].bias": ELEMENTWISE,
            "layers.?.norm[12].weight": ELEMENTWISE,
            "layers.?.norm[12].bias": ELEMENTWISE,
            "norm.weight": ELEMENTWISE,
            "norm.bias": ELEMENTWISE,
        },
    ),
    "ResNet": Case(
        ResNet,
        class_loss,
        {
            "conv1.weight": WHITENED,
            "bn1.weight": ELEMENTWISE,
            "bn1.bias": ELEMENTWISE,
            "layer?.?.conv[12].weight": WHITENED,
            "layer?.?.bn[12].weight": ELEMENTWISE,
            "layer?.?.bn[12].bias": ELEMENTWISE,
            "layer?.?.downsample.0.weight": WHITENED,
            "layer?.?.downsample.1.weight": ELEMENTWISE,
            "layer?.?.downsample.1.bias": ELEMENTWISE,
            "fc.weight": ELEMENTWISE,
            "fc.bias": ELEMENTWISE,
        },
    ),
    "GPT": Case(lambda: gpt(tied=False), next_token_loss, OUR_GPT | {"head.weight": ELEMENTWISE}),
    "GPT, tied": Case(lambda: gpt(tied=True), next_token_loss, OUR_GPT),
    "Hugging Face GPT-2": Case(
        hugging_face_gpt2,
        next_token_loss,
        {
            "transformer.wte.weight": ELEMENTWISE,
            "transformer.wpe.weight": ELEMENTWISE,
            "transformer.h.?.ln_[12].weight": ELEMENTWISE,
            "transformer.h.?.ln_[12].bias": ELEMENTWISE,
            "transformer.h.?.attn.c_attn.weight": WHITENED,
            "transformer.h.?.attn.c_attn.bias": ELEMENTWISE,
            "transformer.h.?.attn.c_proj.weight": WHITENED,
            "transformer.h.?.attn.c_proj.bias": ELEMENTWISE,
            "transformer.h.?.mlp.c_fc.weight": WHITENED,
            "transformer.h.?.mlp.c_fc.bias": ELEMENTWISE,
            "transformer.h.?.mlp.c_proj.weight": WHITENED,
            "transformer.h.?.mlp.c_proj.bias": ELEMENTWISE,
            "transformer.ln_f.weight": ELEMENTWISE,
            "transformer.ln_f.bias": ELEMENTWISE,
        },
    ),
    "Hugging Face ViT": Case(
        hugging_face_vit,
        class_loss,
        {  # the attention's names are those of transformers 5, or those of 4
            "vit.embeddings.cls_token": ELEMENTWISE,
            "vit.embeddings.position_embeddings": ELEMENTWISE,
            "vit.embeddings.patch_embeddings.projection.weight": WHITENED,
            "vit.embeddings.patch_embeddings.projection.bias": ELEMENTWISE,
            "vit.*layer*.?.attention.*.weight": WHITENED,
            "vit.*layer*.?.attention.*.bias": ELEMENTWISE,
            "vit.*layer*.?.[mio]*.weight": WHITENED,
            "vit.*layer*.?.[mio]*.bias": ELEMENTWISE,
            "vit.*layer*.?.layernorm_*.weight": ELEMENTWISE,
            "vit.*layer*.?.layernorm_*.bias": ELEMENTWISE,
            "vit.layernorm.weight": ELEMENTWISE,
            "vit.layernorm.bias": ELEMENTWISE,
            "classifier.weight": ELEMENTWISE,
            "classifier.bias": ELEMENTWISE,
        },
    ),
    "Hugging Face Llama": Case(hugging_face_llama, next_token_loss, LLAMA | {"lm_head.weight": ELEMENTWISE}),
    "Hugging Face Llama, tied": Case(lambda: hugging_face_llama(tie_word_embeddings=True), next_token_loss, LLAMA),
}


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_is_in_the_right_group(name: str) -> None:
    """The list of each model is complete: every parameter is in one group, and it is the one listed."""
    assert_routed(CASES[name].build(), CASES[name].expected)


@pytest.mark.parametrize("name", CASES)
def test_groups_hold_the_parameters_and_their_options(name: str) -> None:
    """Parameters are the model's, under their names; the whitened have decay and, in SPlus, bases, and no others do."""
    model = CASES[name].build()
    groups = param_groups(model, weight_decay=0.3)
    names = [group["name"] for group in groups]
    assert names == [name for name in (WHITENED, "embeddings", "head", "other") if name in names]
    assert [(group["whiten"], group["weight_decay"]) for group in groups] == [(True, 0.3)] + [(False, 0.0)] * (
        len(groups) - 1
    )
    named = dict(model.named_parameters())
    for group in groups:
        assert all(named[name] is parameter for name, parameter in zip(group["param_names"], group["params"]))
        assert len(group["param_names"]) == len(group["params"])
    optimizer = SPlus(groups)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert ("factor_left" in optimizer.state[parameter]) == (group["name"] == WHITENED)


@pytest.mark.parametrize("name", CASES)
def test_training(name: str) -> None:
    """A few steps on a fixed batch lower its loss, at the weights and at their average, and everything stays finite."""
    model, loss = CASES[name].build(), CASES[name].loss
    optimizer = SPlus(param_groups(model))
    before = loss(model).item()
    for _ in range(5):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    assert loss(model).item() < before
    with optimizer.averaged():
        assert loss(model).item() < before
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert all(optimizer.state[parameter]["step"] == 5 for parameter in model.parameters())


@pytest.mark.parametrize("name", CASES)
def test_groups_work_with_other_optimizers(name: str) -> None:
    """torch.optim.AdamW takes the groups as they are, with their decays, and trains."""
    model, loss = CASES[name].build(), CASES[name].loss
    optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.3), lr=3e-3)
    decays = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
    assert decays == dict.fromkeys(decays, 0.0) | {WHITENED: 0.3}
    before = loss(model).item()
    for _ in range(3):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    assert loss(model).item() < before


@pytest.mark.parametrize("name", CASES)
def test_says_nothing(name: str, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> None:
    """Nothing is printed or warned about, and the model is as it was."""
    model = CASES[name].build()
    before = copy.deepcopy(model.state_dict())
    capsys.readouterr()
    recwarn.clear()
    param_groups(model)
    assert capsys.readouterr() == ("", "")
    assert len(recwarn) == 0
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["GPT", "GPT, tied", "ResNet"])
def test_wrappers_do_not_change_the_routing(name: str) -> None:
    """A module inside another that adds a prefix to names, as data-parallel and compiled ones do, routes the same."""

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self._orig_mod = module

    model = CASES[name].build()
    prefixed = {f"_orig_mod.{name}": group for name, group in routing(model).items()}
    assert routing(Wrapper(model)) == prefixed


def test_tied_head_goes_with_its_embedding_whichever_comes_first() -> None:
    """A tied weight is one parameter, under its first name, and elementwise from either side."""

    class Tied(nn.Module):
        def __init__(self, head_first: bool) -> None:
            super().__init__()
            embedding, decoder = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            decoder.weight = embedding.weight
            for name, module in [("decoder", decoder), ("embedding", embedding)][:: 1 if head_first else -1]:
                self.add_module(name, module)

    assert roles(Tied(head_first=True)) == {"decoder.weight": "head"}
    assert roles(Tied(head_first=False)) == {"embedding.weight": "head"}


def test_one_group_only() -> None:
    """A model of one kind of parameter has one group; SPlus takes it."""
    for model, name in (
        (nn.Linear(3, 3, bias=False), WHITENED),
        (nn.LayerNorm(3), "other"),
        (nn.Embedding(3, 3), "embeddings"),
    ):
        groups = param_groups(model)
        assert [group["name"] for group in groups] == [name]
        SPlus(groups)


def test_frozen_parameters_are_listed() -> None:
    """They are in their groups too, so that they can be thawed later."""
    model = gpt(tied=False)
    expected = routing(model)
    model.requires_grad_(False)
    assert routing(model) == expected


# Fused, stacked and grouped matrices


def test_attention_projections_are_whitened_apart() -> None:
    """torch's fused in_proj_weight is three matrices; of other key and value sizes it has three parameters anyway."""
    fused = nn.MultiheadAttention(6, 2, bias=False)
    assert matrices(fused) == {"in_proj_weight": (3, 6, 6), "out_proj.weight": (1, 6, 6)}
    apart = nn.MultiheadAttention(6, 2, kdim=4, vdim=5, add_bias_kv=True)
    assert matrices(apart) == {
        "q_proj_weight": (1, 6, 6),
        "k_proj_weight": (1, 6, 4),
        "v_proj_weight": (1, 6, 5),
        "out_proj.weight": (1, 6, 6),
    }
    assert routing(apart)["bias_k"] == ELEMENTWISE


def test_split_of_hugging_face_columns() -> None:
    """Conv1D stores (in, out), so sections are columns: q, k and v of GPT-2 are three matrices."""
    model = hugging_face_gpt2()
    split = {"*c_attn.weight": 3}
    assert set(option_of(model, "split_dim", split=split).values()) == {1}
    sections = option_of(model, "split", split=split)
    assert {name: count for name, count in sections.items() if count is not None} == {
        f"transformer.h.{layer}.attn.c_attn.weight": 3 for layer in range(2)
    }
    found = matrices(model, split=split)
    assert found["transformer.h.0.attn.c_attn.weight"] == (3, 16, 16)
    assert found["transformer.h.0.mlp.c_fc.weight"] == (1, 16, 64)


def test_split_of_linear_rows() -> None:
    """A fused Linear is split by rows, into equal sections or into sizes; the first pattern that matches counts."""
    model = nn.ModuleDict({"qkv": nn.Linear(4, 12), "gate_up": nn.Linear(4, 10), "out": nn.Linear(4, 4)})
    assert matrices(model, split={"qkv.*": 3, "gate*weight": (4, 6)})["qkv.weight"] == (3, 4, 4)
    assert option_of(model, "split", split={"gate*weight": (4, 6), "*.weight": 2}) == {
        "qkv.weight": 2,
        "gate_up.weight": (4, 6),
        "out.weight": 2,
    }
    assert set(option_of(model, "split_dim", split={"qkv.*": 3}).values()) == {0}


@pytest.mark.parametrize(
    ("layer", "gates"),
    [(nn.LSTM(3, 5, num_layers=2), 4), (nn.GRU(3, 5, num_layers=2, bidirectional=True), 3), (nn.RNN(3, 5), 1)],
)
def test_gates_of_recurrent_layers_are_whitened_apart(layer: nn.Module, gates: int) -> None:
    """Four of an LSTM, three of a GRU, one of a plain recurrence, input and hidden, in every layer and direction."""
    found = matrices(layer)
    assert found == {
        name: (gates, 5, parameter.shape[1]) for name, parameter in layer.named_parameters() if parameter.ndim == 2
    }
    assert matrices(nn.LSTMCell(3, 5)) == {"weight_ih": (4, 5, 3), "weight_hh": (4, 5, 5)}


@pytest.mark.parametrize("projection", [3, 4])
def test_projection_of_an_lstm_has_no_gates(projection: int) -> None:
    """The matrix that projects the hidden state (proj_size) is one matrix."""
    found = matrices(nn.LSTM(6, 8, proj_size=projection))
    assert found["weight_hr_l0"] == (1, projection, 8)
    assert found["weight_hh_l0"] == (4, 8, projection)


def test_groups_of_a_convolution_are_whitened_apart() -> None:
    """Each group of a grouped convolution is a map of its own."""
    assert matrices(nn.Conv2d(8, 12, 3, groups=2)) == {"weight": (2, 6, 4 * 9)}
    assert matrices(nn.Conv1d(8, 12, 3)) == {"weight": (1, 12, 8 * 3)}
    assert matrices(nn.ConvTranspose2d(8, 12, 3, groups=2)) == {"weight": (2, 4, 6 * 9)}


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Conv1d(8, 8, 4, groups=8, padding=3),
        nn.Conv2d(8, 16, 3, groups=8),
        nn.ConvTranspose2d(8, 8, 3, groups=8),
    ],
)
def test_depthwise_convolutions_are_elementwise(layer: nn.Module) -> None:
    """Kernels that each see one channel are not maps between features, with one kernel a channel or several."""
    assert routing(layer) == {"weight": ELEMENTWISE, "bias": ELEMENTWISE}


@pytest.mark.parametrize("layer", [nn.Conv2d(1, 8, 1), nn.Conv2d(8, 1, 3), nn.Linear(1, 8), nn.Linear(8, 1)])
def test_single_rows_and_columns_are_elementwise(layer: nn.Module) -> None:
    """A vector written as a matrix is listed where it is stepped: elementwise, without decay."""
    assert routing(layer) == {"weight": ELEMENTWISE, "bias": ELEMENTWISE}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(4, 6, 5))
        self.down = nn.Parameter(torch.zeros(2, 2, 5, 6))
        self.mix = nn.Parameter(torch.zeros(4, 6))
        self.scale = nn.Parameter(torch.zeros(4, 1, 1))
        self.query_tokens = nn.Parameter(torch.zeros(3, 6))
        self.pos_embed = nn.Parameter(torch.zeros(7, 6))
        self.relative_position_table = nn.Parameter(torch.zeros(7, 6))
        self.class_vector = nn.Parameter(torch.zeros(1, 6))
        self.temperature = nn.Parameter(torch.tensor(1.0))


def test_bare_parameters() -> None:
    """(E, m, n) is a stack of E matrices, (m, n) a matrix; tables of positions and tokens, vectors, scalars are not."""
    assert matrices(Experts()) == {"up": (4, 6, 5), "down": (4, 5, 6), "mix": (1, 4, 6)}
    assert option_of(Experts(), "stacked") == {"up": True, "down": True, "mix": False}
    elementwise = {"scale", "query_tokens", "pos_embed", "relative_position_table", "class_vector", "temperature"}
    assert {name for name, group in routing(Experts()).items() if group == ELEMENTWISE} == elementwise


def test_other_layers_of_torch() -> None:
    """Bilinear maps are a matrix for each output; embeddings and every norm of torch are elementwise."""
    assert matrices(nn.Bilinear(3, 4, 5)) == {"weight": (5, 3, 4)}
    norms = [nn.LayerNorm((3, 4)), nn.GroupNorm(2, 4), nn.RMSNorm((3, 4)), nn.InstanceNorm2d(4, affine=True)]
    for layer in [nn.Embedding(5, 4), nn.EmbeddingBag(5, 4), nn.BatchNorm1d(4), nn.PReLU(4), *norms]:
        assert set(routing(layer).values()) == {ELEMENTWISE}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_parametrized_layers_route_as_the_plain_ones() -> None:
    """A weight under spectral_norm, weight_norm or orthogonal keeps the routing and the matrix of its layer."""
    plain = nn.ModuleDict(
        {"conv": nn.Conv2d(4, 8, 3), "linear": nn.Linear(8, 8), "table": nn.Embedding(9, 8), "head": nn.Linear(8, 9)}
    )
    expected = matrices(plain)
    assert expected == {"conv.weight": (1, 8, 36), "linear.weight": (1, 8, 8)}
    norms = {
        "spectral_norm": (nn.utils.parametrizations.spectral_norm, "parametrizations.weight.original"),
        "weight_norm": (nn.utils.parametrizations.weight_norm, "parametrizations.weight.original1"),
        "old weight_norm": (nn.utils.weight_norm, "weight_v"),
        "old spectral_norm": (nn.utils.spectral_norm, "weight_orig"),
    }
    for apply, name in norms.values():
        model = copy.deepcopy(plain)
        for layer in model.values():
            apply(layer)
        assert matrices(model) == {f"{layer}.{name}": expected[f"{layer}.weight"] for layer in ("conv", "linear")}
        whitened = {parameter for parameter, group in routing(model).items() if group == WHITENED}
        assert whitened == {f"conv.{name}", f"linear.{name}"}


# Heads


@pytest.mark.parametrize("name", ["head", "lm_head", "fc", "classifier", "score", "qa_outputs", "output_projection"])
def test_heads_by_name(name: str) -> None:
    """A linear layer that libraries call a head is one, at the top of a model and not inside repeated blocks."""
    block = nn.ModuleDict({name: nn.Linear(4, 4)})
    model = nn.ModuleDict({"blocks": nn.ModuleList([block]), name: nn.Linear(4, 4)})
    assert routing(model)[f"{name}.weight"] == ELEMENTWISE
    assert routing(model)[f"blocks.0.{name}.weight"] == WHITENED


def test_head_that_is_a_sequence() -> None:
    """Of a classifier that is a sequence of layers the last linear one is the head."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 3), nn.Softmax(dim=1))
    model = nn.ModuleDict({"features": nn.Linear(4, 4), "classifier": layers})
    whitened = {name for name, group in routing(model).items() if group == WHITENED}
    assert whitened == {"features.weight", "classifier.0.weight"}


def test_last_layer_of_a_sequence_is_the_head() -> None:
    """A model that is a nn.Sequential ends with its head; sequences inside a model do not."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2))
    assert {name for name, group in routing(model).items() if group == WHITENED} == {"0.weight", "2.0.weight"}
    inside = nn.ModuleDict({"body": model})
    assert routing(inside)["body.3.weight"] == WHITENED


def test_head_patterns() -> None:
    """Patterns of module names add heads to those that are found."""
    model = nn.ModuleDict(
        {"decoder": nn.ModuleDict({"to_tokens": nn.Linear(4, 9), "inner": nn.Linear(4, 4)}), "head": nn.Linear(4, 2)}
    )
    assert routing(model)["decoder.to_tokens.weight"] == WHITENED
    found = routing(model, head=["*.to_tokens"])
    assert {name for name, group in found.items() if group == WHITENED} == {"decoder.inner.weight"}


def test_head_pattern_of_a_sequence() -> None:
    """A pattern that names a sequence of layers makes its last linear layer the head; it is not without effect."""
    model = nn.ModuleDict(
        {"body": nn.Linear(4, 4), "decoder": nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 9))}
    )
    found = routing(model, head=["decoder"])
    assert {name for name, group in found.items() if group == WHITENED} == {"body.weight", "decoder.0.weight"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": ["decoder"]}, r"'decoder' of head matches nothing.*'head'"),
        ({"head": ["head", "*.output"]}, r"'\*\.output' of head matches nothing"),
        ({"split": {"*.qvk.weight": 3}}, r"'\*\.qvk\.weight' of split matches nothing.*'head\.weight'"),
    ],
)
def test_patterns_that_match_nothing(options: dict[str, Any], message: str) -> None:
    """A typo in a pattern is an error that shows what names are like."""
    with pytest.raises(ValueError, match=message):
        param_groups(gpt(tied=False), **options)


def test_split_of_what_is_not_whitened() -> None:
    """A pattern of split that matches no whitened matrix would do nothing: an error too."""
    with pytest.raises(ValueError, match=r"'token\.weight' of split"):
        param_groups(gpt(tied=False), split={"token.weight": 2})


def test_split_that_does_not_divide() -> None:
    """Sections that do not fit are an error of SPlus that names the parameter."""
    with pytest.raises(ValueError, match=r"'transformer\.blocks\.0\.attention\.out\.weight'.*split=3.*16"):
        SPlus(param_groups(gpt(tied=False), split={"*.attention.*.weight": 3}))


def test_parametrized_projections_and_gates_are_whitened_apart() -> None:
    """What parametrizes a fused weight has its sections."""
    attention, lstm = nn.MultiheadAttention(8, 2), nn.LSTM(8, 8)
    for layer, name, sections in ((attention, "in_proj_weight", 3), (lstm, "weight_ih_l0", 4)):
        nn.utils.parametrize.register_parametrization(layer, name, nn.Identity())
        group = next(group for group in param_groups(layer) if group["name"] == WHITENED)
        place = group["param_names"].index(f"parametrizations.{name}.original")
        assert group["split"][place] == sections


@pytest.mark.parametrize("wrapper", ["module", "_orig_mod"])
def test_head_of_a_wrapped_sequence(wrapper: str) -> None:
    """The last layer of a sequence is its head inside the wrappers of torch too."""
    model = nn.Module()
    model.add_module(wrapper, nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 3)))
    assert {name for name, group in routing(model).items() if group == WHITENED} == {f"{wrapper}.0.weight"}

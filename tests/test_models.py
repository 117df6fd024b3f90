"""The three models: what they see, where they start, how their parameters are told apart."""

import pytest
import torch
from einops import rearrange
from torch import Generator, nn

from splus import param_groups
from train.models.dit import DiT
from train.models.gpt import GPT
from train.models.transformer import Attention, Block
from train.models.vit import ViT, patches

SIZE = {"width": 32, "depth": 2, "heads": 2}
IMAGE = {"image_size": 8, "channels": 3, "classes": 5, "patch": 4}


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def gpt(**settings) -> GPT:
    return GPT(vocabulary=256, context=16, **SIZE, generator=seeded(), **settings)


def vit(seed: int = 0) -> ViT:
    return ViT(**IMAGE, **SIZE, generator=seeded(seed))


def dit() -> DiT:
    return DiT(**IMAGE, **SIZE, generator=seeded())


def everything_drawn(model):
    """The model with noise on every weight, so that none is zero as at the start."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=seeded(1))
    return model


def inputs(model):
    images = torch.randn(4, 3, 8, 8, generator=seeded())
    if isinstance(model, GPT):
        return (torch.randint(256, (4, 16), generator=seeded()),)
    return (images,) if isinstance(model, ViT) else (images, torch.rand(4, generator=seeded()), torch.arange(4))


@pytest.mark.parametrize(("make", "shape"), [(gpt, (4, 16, 256)), (vit, (4, 5)), (dit, (4, 3, 8, 8))])
def test_output_has_the_shape_of_the_objective(make, shape):
    model = make()
    assert model(*inputs(model)).shape == shape


@pytest.mark.parametrize("make", [gpt, vit, dit])
def test_there_are_no_biases_and_every_weight_receives_a_gradient(make):
    model = everything_drawn(make())
    model(*inputs(model)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert not name.endswith("bias")
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_gpt_sees_no_later_token():
    model = everything_drawn(gpt())
    (tokens,) = inputs(model)
    changed = tokens.clone()
    changed[:, 10:] = 0
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_vit_and_dit_see_every_patch():
    for model in (everything_drawn(vit()), everything_drawn(dit())):
        images, *rest = inputs(model)
        images.requires_grad_()
        model(images, *rest).square().sum().backward()
        assert bool(images.grad.abs().sum(1).gt(0).all())


def test_dit_depends_on_time_and_label():
    model = everything_drawn(dit())
    images, times, labels = inputs(model)
    output = model(images, times, labels)
    assert not torch.allclose(output, model(images, times / 2, labels))
    assert not torch.allclose(output, model(images, times, torch.full_like(labels, IMAGE["classes"])))


def test_dit_starts_with_blocks_that_change_nothing_and_a_prediction_of_zero():
    model = dit()
    x, condition = torch.randn(4, 4, 32), torch.randn(4, 32)
    for block in model.transformer.blocks:
        torch.testing.assert_close(block(x, condition), x, rtol=0, atol=0)
    assert not model(*inputs(model)).any()


def test_attention_takes_queries_keys_and_values_from_three_sections_of_rows():
    attention = Attention(width=32, heads=2, causal=False)
    x = torch.randn(3, 5, 32)
    q, k, v = (rearrange(x @ w.T, "b t (h d) -> b h t d", h=2) for w in attention.qkv.weight.split(32))
    weights = (q @ k.transpose(-1, -2) / 16**0.5).softmax(-1)
    expected = rearrange(weights @ v, "b h t d -> b t (h d)") @ attention.out.weight.T
    torch.testing.assert_close(attention(x), expected)


def test_patches_run_from_left_to_right_and_top_to_bottom():
    images = torch.arange(2 * 3 * 8 * 8.0).view(2, 3, 8, 8)
    expected = images[1, :, 4:, :4]  # third patch: bottom left
    torch.testing.assert_close(patches(images, 4)[1, 2].view(4, 4, 3), rearrange(expected, "c i j -> i j c"))


def test_weights_depend_on_their_generator_alone():
    torch.manual_seed(1)
    first = vit().state_dict()
    torch.manual_seed(2)
    torch.testing.assert_close(first, vit().state_dict(), rtol=0, atol=0)
    assert not torch.equal(first["head.weight"], vit(seed=1).head.weight)


def test_tied_head_is_the_token_embedding():
    tied, untied = gpt(tied=True), gpt()
    assert tied.head.weight is tied.token.weight
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 256 * 32


@pytest.mark.parametrize("make", [gpt, vit, dit])
def test_matrices_between_features_are_whitened_and_nothing_else(make):
    model = make()
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    groups = {group["name"]: set(group["param_names"]) for group in param_groups(model, split=model.fused)}
    assert groups["whitened"] == linear - {"head.weight"}
    assert groups["head"] == {"head.weight"}
    embeddings = {
        "gpt": {"token.weight", "position.weight"},
        "vit": {"class_token", "position"},
        "dit": {"position", "label_embedding.weight"},
    }
    assert groups["embeddings"] == embeddings[make.__name__]


def test_sizes_that_do_not_fit_are_refused_by_name():
    with pytest.raises(ValueError, match="width=30 is not a multiple of heads=4"):
        Block(30, 4, causal=False, conditioned=False)
    with pytest.raises(ValueError, match="patch=3 does not divide"):
        ViT(**IMAGE | {"patch": 3}, **SIZE, generator=seeded())

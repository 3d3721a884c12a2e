"""Layers and what torch does to them: norms, parametrisations, kinds of numbers, functions with their own backward."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import paceline

from .registry import FEATURES, SAMPLES, Block, Net, adamw, entry, integers, make_job, numbers


@entry("residual blocks of linear layers")
def residual() -> paceline.Job:
    return make_job()


@entry("a Sequential")
def sequential() -> paceline.Job:
    return make_job(
        lambda: nn.Sequential(
            *(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU()) for _ in range(4)),
            nn.Linear(FEATURES, 3),
        )
    )


@entry("a deep net of narrow layers")
def deep() -> paceline.Job:
    return make_job(lambda: Net(blocks=8), optimizer=adamw)


@entry("a single layer")
def single_layer() -> paceline.Job:
    return make_job(lambda: nn.Linear(FEATURES, 3))


@entry("a bare parameter at the root")
def bare_parameter() -> paceline.Job:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.scale, self.shift = (
                Net(),
                nn.Parameter(torch.ones(3)),
                nn.Parameter(torch.tensor(0.5)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) * self.scale + self.shift

    return make_job(Root)


@entry("layer norms")
def layer_norm() -> paceline.Job:
    return make_job(
        lambda: Net(lambda: nn.Sequential(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES)))
    )


@entry("root-mean-square norms")
def rms_norm() -> paceline.Job:
    return make_job(
        lambda: Net(lambda: nn.Sequential(nn.RMSNorm(FEATURES), nn.Linear(FEATURES, FEATURES)))
    )


@entry("batch norms in a list of modules, evaluated")
def batch_norm() -> paceline.Job:
    data = TensorDataset(numbers(48, FEATURES), numbers(48, 3, seed=3))
    return make_job(
        lambda: Net(lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES))),
        data=data,
        validation=data,
    )


@entry("batch norms with a last window of two samples")
def batch_norm_short_window() -> paceline.Job:
    return make_job(
        lambda: Net(lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)))
    )


@entry("batch norms over few samples, which amplify rounding")
def batch_norm_few_samples() -> paceline.Job:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Linear(16, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Linear(16, 16),
            nn.Linear(16, 3),
        )

    return make_job(
        model,
        batch=8,
        data=TensorDataset(numbers(80, FEATURES), numbers(80, 3, seed=3)),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.3, momentum=0.9),
    )


@entry("batch norms whose statistics are an average over all steps")
def batch_norm_cumulative() -> paceline.Job:
    return make_job(
        lambda: Net(lambda: nn.BatchNorm1d(FEATURES, momentum=None)),
        data=TensorDataset(numbers(48, FEATURES), numbers(48, 3, seed=3)),
    )


class BatchNormByHand(nn.BatchNorm1d):
    """With a forward of its own, which calls torch's operator."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.batch_norm(
            x,
            1.1 * self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            self.training,
            0.2,
            1e-4,
            False,
        )


@entry("batch norms that call the operator themselves")
def batch_norm_by_hand() -> paceline.Job:
    return make_job(
        lambda: Net(lambda: BatchNormByHand(FEATURES)),
        data=TensorDataset(numbers(48, FEATURES), numbers(48, 3, seed=3)),
    )


@entry("batch norms in evaluation mode, as in fine-tuning")
def batch_norm_frozen() -> paceline.Job:
    class Frozen(Net):
        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            for module in self.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.eval()
            return self

    return make_job(
        lambda: Frozen(
            lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES))
        )
    )


@entry("dropout, switched off while it is compared", random_layers=True)
def dropout() -> paceline.Job:
    return make_job(
        lambda: Net(lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Dropout(0.3)))
    )


@entry("Gaussian noise in the forward, switched off while it is compared", random_layers=True)
def noise() -> paceline.Job:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn_like(x)

    return make_job(lambda: Net(lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), Noise())))


@entry("slopes and counts that are drawn, switched off while they are compared", random_layers=True)
def drawn_slopes_and_counts() -> paceline.Job:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.1 * torch.poisson(x.detach().exp()) + torch.normal(x.detach(), 0.5)

    return make_job(
        lambda: Net(lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.RReLU(), Counts()))
    )


@entry("a variational autoencoder by reparametrisation", random_layers=True)
def variational() -> paceline.Job:
    class Variational(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Net(outputs=8)
            self.decoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, FEATURES))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, spread = self.encoder(x).chunk(2, -1)
            return self.decoder(mean + torch.randn_like(mean) * (spread / 2).exp()), mean, spread

    def loss(output: Any, target: Tensor) -> Tensor:
        made, mean, spread = output
        return F.mse_loss(made, target) - 0.5 * (1 + spread - mean.square() - spread.exp()).mean()

    return make_job(
        Variational,
        data=TensorDataset(numbers(SAMPLES, FEATURES), numbers(SAMPLES, FEATURES)),
        loss=loss,
    )


@entry("spectral norms by parametrisation, whose vectors change with every forward: coupled")
def spectral_norm() -> paceline.Job:
    return make_job(
        lambda: Net(lambda: parametrizations.spectral_norm(nn.Linear(FEATURES, FEATURES)))
    )


@entry("spectral norms by hook, as they were before: coupled")
def spectral_norm_old() -> paceline.Job:
    return make_job(lambda: Net(lambda: nn.utils.spectral_norm(nn.Linear(FEATURES, FEATURES))))


@entry("weight norms by parametrisation")
def weight_norm() -> paceline.Job:
    return make_job(
        lambda: Net(lambda: parametrizations.weight_norm(nn.Linear(FEATURES, FEATURES)))
    )


@entry("weight norms by hook, as they were before")
def weight_norm_old() -> paceline.Job:
    import warnings

    def layer() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return nn.utils.weight_norm(nn.Linear(FEATURES, FEATURES))

    return make_job(lambda: Net(layer))


@entry("orthogonal weights by parametrisation")
def orthogonal() -> paceline.Job:
    return make_job(lambda: Net(lambda: parametrizations.orthogonal(nn.Linear(FEATURES, FEATURES))))


@entry("symmetric weights by a parametrisation of the user's")
def symmetric() -> paceline.Job:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).mT

    def layer() -> nn.Module:
        linear = nn.Linear(FEATURES, FEATURES)
        parametrize.register_parametrization(linear, "weight", Symmetric())
        return linear

    return make_job(lambda: Net(layer))


def _spectral(dtype: torch.dtype, **changes: Any) -> paceline.Job:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(FEATURES // 2 + 1, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=FEATURES)

    return make_job(lambda: Net(Spectral), **changes)


@entry("complex parameters", tolerance=1e-5)
def complex_parameters() -> paceline.Job:
    return _spectral(torch.complex64)


@entry("complex parameters of two float64 each")
def complex128_parameters() -> paceline.Job:
    return _spectral(torch.complex128)


@entry("complex parameters with clipping and AdamW", tolerance=1e-5)
def complex_with_clip() -> paceline.Job:
    return _spectral(torch.complex64, clip=0.1, optimizer=adamw)


@entry("buffers in float16, which scale")
def float16_buffer() -> paceline.Job:
    class Half(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.linspace(0.5, 1.5, FEATURES, dtype=torch.float16))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale.to(x.dtype))

    return make_job(Half)


@entry("buffers that are not saved")
def unsaved_buffer() -> paceline.Job:
    class Unsaved(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.arange(FEATURES) % 2 == 0, persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.masked_fill(self.mask, 0.5))

    return make_job(Unsaved)


class Sign(torch.autograd.Function):
    """The sign, with a backward that lets gradients straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


class Binary(nn.Module):
    """A linear layer of signs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Sign.apply(x), Sign.apply(self.linear.weight), self.linear.bias) / FEATURES


@entry("an autograd function with a backward of its own: binarised layers")
def binarised() -> paceline.Job:
    return make_job(lambda: Net(Binary))


@entry("binarised layers with batch norms")
def binarised_with_batch_norm() -> paceline.Job:
    return make_job(
        lambda: Net(lambda: nn.Sequential(Binary(), nn.BatchNorm1d(FEATURES))),
        data=TensorDataset(numbers(48, FEATURES), numbers(48, 3, seed=3)),
    )


class Reversal(torch.autograd.Function):
    """The identity, whose gradient is turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


@entry("a gradient reversal before a second head")
def gradient_reversal() -> paceline.Job:
    class Adversary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.adversary = Net(outputs=FEATURES), nn.Linear(FEATURES, 3)
            self.head = nn.Linear(FEATURES, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.net(x)
            return self.head(x) + self.adversary(Reversal.apply(x))

    return make_job(Adversary)


@entry("detached parts and parts without gradients")
def detach_and_no_grad() -> paceline.Job:
    class Detached(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = self.first(x).norm(dim=1, keepdim=True)
            hidden = self.first(x) / (1 + scale)
            for block in self.blocks:
                hidden = block(hidden) + hidden.detach() * 0.1
            return self.last(hidden)

    return make_job(Detached)


@entry("rounding with gradients straight through by detach")
def straight_through() -> paceline.Job:
    class Round(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(FEATURES, FEATURES)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            return x + ((4 * x).round() / 4 - x).detach()

    return make_job(lambda: Net(Round))


@entry("checkpoints in the forward, without reentrance")
def checkpointed() -> paceline.Job:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.last(x)

    return make_job(Checkpointed)


@entry("an embedding whose rows are renormalised where they are looked up")
def max_norm_embedding() -> paceline.Job:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.net = nn.Embedding(34, FEATURES, max_norm=1.0), Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.table(x).mean(1))

    return make_job(
        Tokens, data=TensorDataset(integers(34, SAMPLES, 4), numbers(SAMPLES, 3, seed=3))
    )


@entry("an embedding with a padding row")
def padded_embedding() -> paceline.Job:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.net = nn.Embedding(34, FEATURES, padding_idx=0), Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.table(x).mean(1))

    return make_job(
        Tokens,
        optimizer=adamw,
        data=TensorDataset(integers(34, SAMPLES, 4) % 20, numbers(SAMPLES, 3, seed=3)),
    )


@entry("a bag of embeddings with weights")
def embedding_bag() -> paceline.Job:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.net = nn.EmbeddingBag(34, FEATURES, mode="sum"), Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.bag(x, per_sample_weights=(x / 34).to(self.bag.weight.dtype)))

    return make_job(Bag, data=TensorDataset(integers(34, SAMPLES, 4), numbers(SAMPLES, 3, seed=3)))


@entry("a sparse embedding under a dense net, each with an SGD step")
def sparse_under_dense() -> paceline.Job:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.net = nn.Embedding(34, FEATURES, sparse=True), Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.table(x).mean(1))

    return make_job(
        Tokens, data=TensorDataset(integers(34, SAMPLES, 4), numbers(SAMPLES, 3, seed=3))
    )


@entry("products by einsum, with weights of three dims")
def einsum() -> paceline.Job:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Parameter(torch.randn(2, FEATURES, 4) / 3)
            self.out = nn.Parameter(torch.randn(2, 4, FEATURES) / 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum(
                "bhe,hed->bd", torch.einsum("bd,hde->bhe", x, self.into).tanh(), self.out
            )

    return make_job(lambda: Net(Heads))


@entry("a bilinear layer and gated units")
def bilinear_and_gates() -> paceline.Job:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bilinear, self.gate = (
                nn.Bilinear(FEATURES, FEATURES, FEATURES),
                nn.Linear(FEATURES, 2 * FEATURES),
            )

        def forward(self, x: Tensor) -> Tensor:
            return F.glu(self.gate(x)) + 0.1 * self.bilinear(x, x)

    return make_job(lambda: Net(Gated))


@entry("learned activations")
def prelu() -> paceline.Job:
    return make_job(
        lambda: Net(lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.PReLU(FEATURES)))
    )


@entry("a float32 layer in a float64 model", tolerance=1e-5)
def float32_inside() -> paceline.Job:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(FEATURES, FEATURES)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x.float(), self.linear.weight.float(), self.linear.bias.float()).to(
                x.dtype
            )

    return make_job(lambda: Net(Inside))


@entry("low-rank adapters on frozen layers, as LoRA")
def adapters() -> paceline.Job:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
            self.down = nn.Parameter(torch.randn(2, FEATURES) / math.sqrt(FEATURES))
            self.up = nn.Parameter(torch.zeros(FEATURES, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x @ self.down.T @ self.up.T

    return make_job(lambda: Net(Adapted), optimizer=adamw)


@entry("a block of the user's that is called with keywords")
def keyword_calls() -> paceline.Job:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(FEATURES, FEATURES)

        def forward(
            self, x: Tensor, *, scale: float = 1.0, residual: Tensor | None = None
        ) -> Tensor:
            x = self.linear(x) * scale
            return x if residual is None else x + residual

    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.last = (
                nn.ModuleList([Keyword() for _ in range(4)]),
                nn.Linear(FEATURES, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            kept = x
            for block in self.blocks:
                x = block(x.tanh(), scale=0.7, residual=kept)
            return self.last(x)

    return make_job(Keywords)


@entry("blocks held in a dictionary of modules and of parameters")
def dictionaries() -> paceline.Job:
    class Dictionaries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({name: Block() for name in ("a", "b", "c")})
            self.scales = nn.ParameterDict(
                {name: nn.Parameter(torch.ones(FEATURES)) for name in ("a", "b", "c")}
            )
            self.last = nn.Linear(FEATURES, 3)

        def forward(self, x: Tensor) -> Tensor:
            for name, part in self.parts.items():
                x = part(x) * self.scales[name]
            return self.last(x)

    return make_job(Dictionaries)

"""A job's named models and followers as one module.

Their names and the seed determine the initial weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from paceline.base.errors import JobError
from paceline.job.own_step import FollowerModel
from paceline.torch_private.modules import own_modules


class NamedModels(nn.Module):
    """A module with models and followers as children of their names. It is never called itself."""

    def __init__(
        self, models: Mapping[str, nn.Module], followers: Mapping[str, FollowerModel]
    ) -> None:
        super().__init__()
        for name, model in models.items():
            try:
                self.add_module(name, model)
            except KeyError as error:
                raise JobError(
                    f"a model can't be named '{name}': {error}", hint="another name"
                ) from error
        self.followers = dict(followers)

    @classmethod
    def of(
        cls,
        models: Mapping[str, Callable[[], Any]],
        followers: Mapping[str, FollowerModel],
        seed: int,
    ) -> NamedModels:
        """Build all models and followers."""
        return cls(
            {
                name: build_named_model(name, models, followers, seed)
                for name in (*models, *followers)
            },
            followers,
        )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each model's own parameter names after the model's name.

        The own names count because in a model that is cut they differ from its modules' paths.
        """
        for name, model in own_modules(self).items():
            assert model is not None
            for key, p in model.named_parameters(remove_duplicate=remove_duplicate):
                yield ".".join(filter(None, (prefix, name, key))), p

    @property
    def names(self) -> list[str]:
        return list(own_modules(self))

    def train(self, mode: bool = True) -> NamedModels:
        """Set the mode of the models; followers stay in evaluation mode."""
        super().train(mode)
        for name in self.followers:
            self.get_submodule(name).eval()
        return self


def build_named_model(
    name: str,
    models: Mapping[str, Callable[[], Any]],
    followers: Mapping[str, FollowerModel],
    seed: int,
) -> nn.Module:
    """Build a model, or a follower, which begins as its source does, with every parameter frozen.

    Raises:
        JobError: the function builds no module, or parameters are shared in a way that a frozen
            copy can't have.
    """
    from paceline.base.streams import key_to_seed, seed_model

    follower = followers.get(name)
    source = name if follower is None or not isinstance(follower.source, str) else follower.source
    build = models.get(source, follower.source if follower is not None else None)
    seed_model(key_to_seed(seed, "model", source))
    model = build()  # type: ignore[misc,operator]
    if not isinstance(model, nn.Module):
        raise JobError(
            f"'{source}' was built as a {type(model).__name__} and not a torch.nn.Module"
        )
    if follower is not None:
        model.requires_grad_(False)
        model.eval()
    return model

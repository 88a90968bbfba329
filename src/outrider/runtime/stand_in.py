"""Stand-in for a model of Transformers: its parameters under their names, without its code.

The native engine needs no more. Whoever needs the model's own code gets the model, built then, over these parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn


class StandIn(nn.Module):
    """Parameters and stored buffers of a model, in plain modules.

    Attributes:
        plan: the native engine's (native/plan.py).
        config: has the fields of Transformers' configuration.
        generation_config: has the field ``eos_token_id``.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        tied: Mapping[str, str],
        embedding: str,
        plan: Any,
        config: Any,
        generation_config: Any,
        build: Callable[[], nn.Module],
    ) -> None:
        """Take the shapes of parameters by name, without numbers yet (on the device "meta"); names of those that are
        the same as another, with the other's; the name of the module that embeds tokens; and what builds the model,
        whose parameters are replaced by these."""
        super().__init__()
        self.plan, self.config, self.generation_config = plan, config, generation_config
        self._embedding, self._build = embedding, build
        for name, shape in shapes.items():
            self.set_parameter(name, nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False))
        for name, other in tied.items():
            self.set_parameter(name, self.get_parameter(other))

    def set_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """Set a parameter under a name with the names of its modules."""
        *modules, leaf = name.split(".")
        module: nn.Module = self
        for part in modules:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, parameter)

    def fill(self, numbers: Mapping[str, Tensor]) -> None:
        """Set parameters that are not tied to others, and those that are tied to them."""
        new = {self.get_parameter(name): _parameter(one) for name, one in numbers.items()}
        for name, old in list(self.named_parameters(remove_duplicate=False)):
            if old in new:
                self.set_parameter(name, new[old])

    def get_input_embeddings(self) -> nn.Module:
        """Module whose ``weight`` has a row for each token."""
        return self.get_submodule(self._embedding)

    @cached_property
    def original(self) -> nn.Module:
        """The model itself, in Transformers' code."""
        model = self._build()
        for name, module in model.named_modules():
            for leaf, _ in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                setattr(module, leaf, self.get_parameter(f"{name}.{leaf}" if name else leaf))
        for name, buffer in model.state_dict(keep_vars=True).items():
            if not isinstance(buffer, nn.Parameter):
                buffer.data = self.get_parameter(name).detach()
        built: Any = model
        built.generation_config.eos_token_id = self.generation_config.eos_token_id
        return model.eval()


def _parameter(numbers: Tensor) -> nn.Parameter:
    if type(numbers) is Tensor:
        return nn.Parameter(numbers)
    # As the constructor marks other types. It would run an operator of theirs, for which PyTorch imports a second's
    # worth of modules (torch.distributed.tensor).
    parameter: nn.Parameter = numbers  # type: ignore[assignment]
    parameter._is_param = True
    return parameter


class StatedConfig:
    """Configuration of a model of text alone: the fields of Transformers' own, without its methods."""

    _attn_implementation = "sdpa"

    def __init__(self, fields: Mapping[str, Any], aliases: Mapping[str, str]) -> None:
        self._fields = dict(fields)
        vars(self).update(fields)
        vars(self).update({alias: fields[name] for alias, name in aliases.items() if name in fields})

    def to_dict(self) -> dict[str, Any]:
        return self._fields

    def get_text_config(self, *, decoder: bool = False) -> StatedConfig:
        return self

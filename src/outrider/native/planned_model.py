"""A model without code: its plan, and its weights under the names of their parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from outrider.native.plan import Plan
from outrider.runtime.weight_tensors import set_weights


class PlannedModel:
    """A model that the native engine can run."""

    def __init__(self, config: Any, plan: Plan, tensors: Mapping[str, Tensor], build: Callable[[], nn.Module]) -> None:
        """Take the configuration that the files state; weights and stored buffers by name, shared ones once; and the
        function that builds the model in Transformers' code, without weights."""
        self.config, self.plan, self.tensors, self._build = config, plan, dict(tensors), build
        self._of_module = self.state_dict()

    def parameters(self) -> Iterable[Tensor]:
        return self.tensors.values()

    def buffers(self) -> Iterable[Tensor]:
        return ()

    def state_dict(self, *, keep_vars: bool = True) -> dict[str, Tensor]:
        """Weights by name; that of a tied LM head under its own name, too."""
        is_tied = self.plan.lm_head.weight == self.plan.embedding
        return self.tensors | ({"lm_head.weight": self.tensors[self.plan.embedding]} if is_tied else {})

    def with_tensors(self, plan: Plan, changed: Mapping[str, Tensor]) -> PlannedModel:
        """This model with other weights under some names, and their plan; it shares all else, and the ``module``."""
        other = copy.copy(self)
        other.plan, other.tensors = plan, self.tensors | dict(changed)
        return other

    @cached_property
    def module(self) -> Any:
        """The model in Transformers' code, over the same weights: for heads, training, and the probe."""
        model: Any = self._build()
        missing = set_weights(model, self._of_module)
        assert not missing, missing
        return model.eval()

"""Which part of each tensor this rank holds now, and loading a restored state into model and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainwarden_hook.packing import Part, Refused, local_part
from trainwarden_hook.sharding import Parts, Path, Region, dotted, whole

if TYPE_CHECKING:
    import torch


class Layout:
    """The distributed tensors of a model and of its optimizer's parameters, by their path in the state."""

    def __init__(self, model_state: Mapping[str, Any], optimizer: Any) -> None:
        self._model = model_state
        groups = getattr(optimizer, "param_groups", [])
        self._parameters = [parameter for group in groups for parameter in group["params"]]

    def reference(self, path: Path) -> Any:
        """The live tensor that lies like the one at ``path``; ``None`` if there is none."""
        if path[0] == "model" and len(path) == 2:
            return self._model.get(path[1])
        numbered = len(path) == 4 and path[:2] == ("optimizer", "state") and isinstance(path[2], int)
        return self._parameters[path[2]] if numbered and path[2] < len(self._parameters) else None

    def place(self, path: Path, leaf: Any, parts: Parts | None) -> Any:
        """What this rank needs of one tensor of the save; see `restore.agree`."""
        live = self.reference(path)
        held = None if live is None else local_part(live)
        if not isinstance(leaf, Part):
            if held is None or tuple(leaf.shape) != tuple(live.shape):
                return leaf
            region = Region(tuple(held[1]), tuple(held[0].shape))
            return distribute(leaf[region.within(whole(tuple(leaf.shape)))].contiguous(), live)
        if parts is None:
            raise Refused(f"{dotted(path)} is a part of a tensor in a save that is not sharded")
        if held is None or tuple(live.shape) != leaf.shape:
            return parts.cut(path, whole(leaf.shape))
        region = Region(tuple(held[1]), tuple(held[0].shape))
        if region == Region(leaf.start, tuple(leaf.data.shape)):
            return distribute(leaf.data, live)
        return distribute(parts.cut(path, region), live)


def distribute(local: torch.Tensor, live: Any) -> Any:
    """A distributed tensor of this rank's part, laid out like ``live``."""
    from torch.distributed.tensor import DTensor

    local = local.to(live.device)
    return DTensor.from_local(
        local, live.device_mesh, live.placements, run_check=False, shape=live.shape, stride=live.stride()
    )


def parameter_names(model: Any, optimizer: Any) -> list[str]:
    """Name in the model of each parameter that the optimizer counts; empty texts for those of other models."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = getattr(optimizer, "param_groups", [])
    return [names.get(id(parameter), "") for group in groups for parameter in group["params"]]


def stable_paths(model: Any, optimizer: Any) -> Any:
    """``stable(path, tensor)``: parameters, and the optimizer's tensors of the same shape, change in its step only."""
    named = dict(model.named_parameters())
    parameters = [parameter for group in getattr(optimizer, "param_groups", []) for parameter in group["params"]]
    own = {id(parameter) for parameter in parameters}
    model_paths = {f"state.model.{name}" for name, parameter in named.items() if id(parameter) in own}
    shapes = {f"state.optimizer.state.{number}.": parameter.shape for number, parameter in enumerate(parameters)}

    def stable(path: str, tensor: torch.Tensor) -> bool:
        if path in model_paths:
            return True
        return shapes.get(path[: path.rfind(".") + 1]) == tensor.shape and tensor.dim() > 0

    return stable

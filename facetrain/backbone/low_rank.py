"""Low-rank adapters (LoRA): small trained updates of the frozen weights of convolutions and linear layers.

The weight W0 of a layer is replaced by W0 + scale · ΔW (Hu et al., arXiv 2106.09685, section 4.1, with scale = alpha /
rank). With I input and O output channels and the rank r:

    linear layer, 1 × 1 convolution      ΔW[o, i] = Σ_a up[o, a] · down[a, i]
    convolution with taps k              ΔW[o, i, k] = Σ_ab up[o, a] · core[a, b, k] · down[b, i]

The second line is the Tucker-2 form of a convolution's update (proposition 3 of FedPara, arXiv 2108.06098; LoCon with
Tucker decomposition in LyCORIS, arXiv 2309.14859). With 3 × 3 taps it has r·(I + O) + 9·r² parameters, where the
product of two matrices would have r·(9·I + O).
"""

# O, I channels of output and input   r rank

from __future__ import annotations

import math
import re
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from facetrain.backbone.settings import PARAMETRIZED, LoraSettings
from facetrain.distributed.sync_batch_norm import BatchNorm
from facetrain.errors import ConfigError, ModelError

_PROJECTIONS = ("q", "k", "v")
"""Order of the projections in the rows of the weight of an attention's `qkv`."""
_TENSOR_OF_UPDATE = re.compile(rf"{re.escape(PARAMETRIZED)}weight\.0\.(parts\.\w+\.)?(up|down)$")
"""End of the name of a tensor that only an adapter has: another parametrization may have a `scale`, too."""


class LowRankUpdate(nn.Module):
    """Parametrization of a weight that adds its low-rank update. The update starts at 0."""

    def __init__(self, weight: Tensor, rank: int, scale: float) -> None:
        """Take the shape of a weight (O, I, …). A rank above O or I is reduced to it."""
        super().__init__()
        outputs, inputs, *taps = weight.shape
        rank = min(rank, outputs, inputs)
        self.up = nn.Parameter(weight.new_zeros(outputs, rank))
        self.down = nn.Parameter(weight.new_empty(rank, inputs))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        self.core: nn.Parameter | None = None
        if math.prod(taps) > 1:
            self.core = nn.Parameter(weight.new_empty(rank, rank, *taps))
            nn.init.kaiming_uniform_(self.core, a=math.sqrt(5))
        # In the state dict, so that a checkpoint can be merged without its config. Not a buffer: those are averaged.
        self.scale = nn.Parameter(weight.new_tensor(scale), requires_grad=False)

    def forward(self, weight: Tensor) -> Tensor:
        """Map the frozen weight (O, I, …) to the updated one."""
        # Autocast would round the update to 16 bits before the sum, and the merged weights would differ.
        with torch.autocast(weight.device.type, enabled=False):
            return _updated(weight, self.up, self.core, self.down, self.scale)


class ProjectionUpdate(nn.Module):
    """Parametrization of the joint weight of queries, keys and values (3·W, I) with a low-rank update of some."""

    def __init__(self, weight: Tensor, rank: int, scale: float, projections: Collection[str]) -> None:
        """Take the projections to update: some of "q", "k" and "v"."""
        super().__init__()
        parts = dict(zip(_PROJECTIONS, weight.chunk(3), strict=True))
        self.parts = nn.ModuleDict({name: LowRankUpdate(parts[name], rank, scale) for name in projections})

    def forward(self, weight: Tensor) -> Tensor:
        """Map the frozen weight (3·W, I) to the updated one."""
        parts = zip(_PROJECTIONS, weight.chunk(3), strict=True)
        return torch.cat([self.parts[name](part) if name in self.parts else part for name, part in parts])


def _updated(weight: Tensor, up: Tensor, core: Tensor | None, down: Tensor, scale: Tensor) -> Tensor:
    """Return the sum of a weight and its update."""
    if core is None:
        return weight + scale * (up @ down).view_as(weight)
    change = torch.einsum("oahw,ai->oihw", torch.tensordot(up, core, 1), down)
    # Without a view of the same shape, an update of fewer taps would be added to all of them.
    return weight + scale * change.view_as(weight)


def add_adapters(network: nn.Module, lora: LoraSettings, *, new_layers: tuple[str, ...] = ()) -> None:
    """Freeze a network, and add a trained low-rank update to convolutions and linear layers.

    Args:
        network: network in training mode. Its batch norms are frozen with it.
        lora: settings of the updates.
        new_layers: prefixes of parameters that have no published weights: they get no update and are trained.

    Raises:
        ConfigError: no layer's name starts with one of the targets, the network has no attentions to update, or the
            weight of a layer is already computed from other parameters.
    """
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name.startswith(new_layers))
    for norm in network.modules():
        if isinstance(norm, BatchNorm):
            norm.eval()
    layers = {
        name: layer for name, layer in network.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)
    }
    for target in lora.targets:
        if not any(name.startswith(target) for name in layers):
            names = ", ".join(sorted({name.split(".")[0] for name in layers}))
            raise ConfigError(
                f"model.lora.targets: no convolution or linear layer has a name that starts with {target!r}; names "
                f"start with one of: {names}"
            )
    if lora.targets:
        layers = {name: layer for name, layer in layers.items() if name.startswith(lora.targets)}
    if lora.projections:
        layers = {name: layer for name, layer in layers.items() if name.endswith(".qkv")}
        _require_projections(network, layers, lora)
    scale = 1.0 if lora.alpha is None else lora.alpha / lora.rank
    for name, layer in layers.items():
        if not f"{name}.".startswith(new_layers):
            # The merged weights would have names that the network does not have. The second condition is that of
            # torch's older functions, which keep the parameters in the layer itself.
            if parametrize.is_parametrized(layer) or "weight" not in dict(layer.named_parameters()):
                raise ConfigError(
                    f"model.lora.targets: {name} computes its weight from other parameters, as weight_norm does, and "
                    "can have no adapter; list the prefixes of other layers"
                )
            update = (
                ProjectionUpdate(layer.weight, lora.rank, scale, lora.projections)
                if lora.projections
                else LowRankUpdate(layer.weight, lora.rank, scale)
            )
            # unsafe: no trial computation, which autocast refuses on the meta device.
            parametrize.register_parametrization(layer, "weight", update, unsafe=True)


def _require_projections(network: nn.Module, layers: Collection[str], lora: LoraSettings) -> None:
    """Refuse layers, given by their names, of which `model.lora.projections` cannot choose rows."""
    if not layers:
        where = (
            "no layer of model.lora.targets is one" if lora.targets else "this network has none; use targets"
        )
        raise ConfigError(
            f"model.lora.projections: they are of layers named qkv, in the attentions of a ViT, and {where}"
        )
    for name in layers:
        attention = network.get_submodule(name.rpartition(".")[0])
        # Their rows are those of one head after the other, and not all queries, keys and values in turn.
        if getattr(attention, "head_first", False) or type(attention).__module__ == "timm.models.tiny_vit":
            raise ConfigError(
                f"model.lora.projections: {name} has its rows by head; leave the key out, which adapts whole layers"
            )


def merge_adapters(state: dict[str, Tensor], origin: str) -> dict[str, Tensor]:
    """Return a state dict in which each updated weight is one tensor, under the name that it has without adapters.

    Args:
        state: state dict of a backbone, with or without adapters.
        origin: file or folder that it comes from, for the error message.

    Raises:
        ModelError: an adapter does not fit its weight.
    """
    # A network of one's own may have other parametrizations, which stay as they are.
    updated_layers = {name.partition(PARAMETRIZED)[0] for name in state if _TENSOR_OF_UPDATE.search(name)}
    merged = {}
    for name, value in state.items():
        layer, mark, rest = name.partition(PARAMETRIZED)
        if not mark or layer not in updated_layers:
            merged[name] = value
        elif rest == "weight.original":
            prefix = f"{layer}{PARAMETRIZED}weight.0."
            try:
                if any(name.startswith(f"{prefix}parts.") for name in state):
                    parts = zip(_PROJECTIONS, value.chunk(3), strict=True)
                    updated = torch.cat(
                        [_merged(state, f"{prefix}parts.{name}.", part) for name, part in parts]
                    )
                else:
                    updated = _merged(state, prefix, value)
            except (KeyError, RuntimeError, IndexError, ValueError) as error:
                raise ModelError(f"{origin}: the adapter of {layer} does not fit its weight") from error
            merged[f"{layer}.weight"] = updated
    return merged


def _merged(state: dict[str, Tensor], prefix: str, weight: Tensor) -> Tensor:
    """Return a weight with the update whose tensors have names with this prefix; a projection may have none."""
    if "parts" in prefix and f"{prefix}up" not in state:
        return weight
    up, down, scale = (state[prefix + key] for key in ("up", "down", "scale"))
    return _updated(weight, up, state.get(prefix + "core"), down, scale.view(()))


def trained_share(network: nn.Module) -> float:
    """Return the fraction of a network's parameters that are trained, relative to the network without adapters."""
    sizes = {name: (value.numel(), value.requires_grad) for name, value in network.named_parameters()}
    adapters = (f"{PARAMETRIZED}weight.0." in name for name in sizes)
    base = sum(size for (size, _), is_adapter in zip(sizes.values(), adapters, strict=True) if not is_adapter)
    return sum(size for size, is_trained in sizes.values() if is_trained) / base

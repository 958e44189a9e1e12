"""The weights of a file's graph, under the names of one of our networks."""

# B images   C channels

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from facetrain.backbone.base import Backbone
from facetrain.errors import ModelError
from facetrain.models.layer_graph import IMAGE, Layer, Network, own_layers

_TO_UNIT_LENGTH = {"ReduceL2", "Clip", "Expand", "Div", "LpNormalization", "L2Normalization"}
"""May follow the embedding: the head looks at directions only."""


@dataclass(frozen=True)
class Adopted:
    """What a file's graph gives one of our networks."""

    weights: dict[str, Tensor]
    """The network's whole state."""
    merged: list[str]
    """The batch norms that the file has merged into the layers before them."""


def adopt(theirs: Network, backbone: Backbone) -> Adopted:
    """Pair the layers of a file with ours, from the image on, and take the weights over.

    Raises:
        ModelError: the file has another network; the message says where they part.
    """
    ours = own_layers(backbone)
    pairs = _pairs(ours, theirs)
    weights: dict[str, Tensor] = {}
    merged = [name for name in pairs if _is_merged(ours.layers[name], theirs.layers[pairs[name]])]
    bias_elsewhere = {ours.layers[name].sources[0] for name in merged}
    for name, other in pairs.items():
        own, layer = ours.layers[name], theirs.layers[other]
        if name in merged:
            found = _passing_on(own, layer)
        elif own.kind == "norm":
            before = own.sources[0]
            # A bias for which the layer before has no place goes into the mean.
            homeless = "bias" not in ours.layers[before].weights
            found = _norm(own, layer, theirs.layers[pairs[before]].weights.get("bias") if homeless else None)
        elif own.kind == "add":
            continue
        else:
            found = _plain(own, layer, theirs.scale if IMAGE in own.sources else 1.0)
            if name in bias_elsewhere and "bias" in found:
                found["bias"] = torch.zeros_like(found["bias"])
        weights |= {f"{name}.{key}": value for key, value in found.items()}
    return Adopted(weights, merged)


def _pairs(ours: Network, theirs: Network) -> dict[str, str]:
    """Return the file's layer for each of ours, in an order in which the image comes first."""
    ours_behind, theirs_behind = ours.behind(), theirs.behind()
    pairs, waiting = {IMAGE: IMAGE}, [IMAGE]
    for name in waiting:  # grows
        if name == ours.output:
            continue
        other, coming = pairs[name], ours_behind[name]
        kinds = {theirs.layers[n].kind: n for n in theirs_behind[other]}
        if [ours.layers[n].kind for n in coming] == ["norm"] and "norm" not in kinds and name != IMAGE:
            kinds = {"norm": other}
        for follower in coming:
            own = ours.layers[follower]
            found = kinds.pop(own.kind, None)
            if found is None or not _fit(own, theirs.layers[found]) or pairs.get(follower, found) != found:
                there = ", ".join(str(theirs.layers[n]) for n in theirs_behind[other]) or "nothing"
                raise _another(ours, theirs, f"behind {name} stands {own}, in the file {there}")
            if follower not in pairs:
                pairs[follower] = found
                waiting.append(follower)
        if kinds:
            more = ", ".join(str(theirs.layers[n]) for n in kinds.values())
            raise _another(ours, theirs, f"behind {name} the file has also {more}")
    paired = set(pairs.values())
    behind = [
        str(layer)
        for name, layer in theirs.layers.items()
        if name not in paired and layer.kind not in _TO_UNIT_LENGTH
    ]
    if behind:
        raise _another(ours, theirs, f"behind {ours.output} the file goes on with {behind[0]}")
    del pairs[IMAGE]
    return pairs


def _another(ours: Network, theirs: Network, part: str) -> ModelError:
    return ModelError(
        f"{theirs.where}: is another network than the {ours.where} of model.backbone: {part}; "
        "give model.backbone, model.embedding_size and data.image_size as the file has them"
    )


def _fit(own: Layer, layer: Layer) -> bool:
    """Whether weights of the file have the place that ours have."""
    if own.kind == "add":
        return True
    if "weight" not in layer.weights:
        return False
    here, there = own.weights["weight"], layer.weights["weight"]
    if _is_merged(own, layer):
        return len(there) == len(here)
    if own.kind == "prelu":
        return there.numel() in (1, here.numel())
    if own.kind == "norm":
        return [other.shape for other in layer.weights.values()] == [here.shape] * 4
    return there.shape == here.shape and (own.kind != "conv" or own.options == layer.options)


def _is_merged(own: Layer, layer: Layer) -> bool:
    return own.kind == "norm" and layer.kind in ("conv", "linear")


def _plain(own: Layer, layer: Layer, scale: float) -> dict[str, Tensor]:
    """Return the weights of a convolution, a linear layer or a PReLU whose input the file takes times `scale`."""
    weight = layer.weights["weight"].float() * scale
    if own.kind == "prelu":
        weight = weight.flatten().expand(len(own.weights["weight"])).clone()
    found = {"weight": weight}
    if "bias" in own.weights:
        found["bias"] = layer.weights.get("bias", torch.zeros(len(weight))).float()
    return found


def _norm(own: Layer, layer: Layer, bias_C: Tensor | None) -> dict[str, Tensor]:
    """Return the weights and statistics of a batch norm, with a bias before it that ours has not."""
    scale_C, mean_C, variance_C = (layer.weights[name].double() for name in ("weight", "mean", "variance"))
    if bias_C is not None:
        mean_C = mean_C - bias_C.double()
    # The same quotient with our eps under the root.
    theirs_C = variance_C + layer.options["eps"]
    variance_C = (theirs_C - own.options["eps"]).clamp(min=0)
    scale_C = scale_C * ((variance_C + own.options["eps"]) / theirs_C).sqrt()
    return _state(scale_C, layer.weights["bias"], mean_C, variance_C)


def _passing_on(own: Layer, layer: Layer) -> dict[str, Tensor]:
    """Return the state of a batch norm that adds the file's bias, and does nothing else."""
    one_C = torch.ones(len(own.weights["weight"]))
    bias_C = layer.weights.get("bias", torch.zeros_like(one_C))
    return _state((one_C + own.options["eps"]).sqrt(), bias_C, torch.zeros_like(one_C), one_C)


def _state(scale_C: Tensor, bias_C: Tensor, mean_C: Tensor, variance_C: Tensor) -> dict[str, Tensor]:
    tensors = {"weight": scale_C, "bias": bias_C, "running_mean": mean_C, "running_var": variance_C}
    return {name: tensor.float() for name, tensor in tensors.items()} | {
        "num_batches_tracked": torch.tensor(0)
    }


def settle_norms(backbone: Backbone, names: Iterable[str], image_BCHW: Tensor) -> None:
    """Give batch norms that pass on what they take the statistics of it, and weights that undo them.

    What the network makes of an image stays the same, in training too: there a norm looks at the statistics of
    the batch, and one that had learned others would change all that comes behind it.
    """

    def settle(module: nn.Module, taken: tuple[Tensor]) -> None:
        assert isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)
        x_BC = taken[0].double().transpose(0, 1).flatten(1)
        mean_C, variance_C = x_BC.mean(1), x_BC.var(1, correction=0)
        module.bias.copy_(module.bias + mean_C)
        module.weight.copy_((variance_C + module.eps).sqrt())
        assert module.running_mean is not None and module.running_var is not None
        module.running_mean.copy_(mean_C)
        module.running_var.copy_(variance_C)

    hooks = [backbone.get_submodule(name).register_forward_pre_hook(settle) for name in names]
    was_training = backbone.training
    try:
        with torch.no_grad():
            backbone.eval()(image_BCHW)
    finally:
        backbone.train(was_training)
        for hook in hooks:
            hook.remove()

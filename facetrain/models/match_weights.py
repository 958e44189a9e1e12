"""Matching of the layers of a file with the layers of a backbone, and conversion of the weights.

A file can hold the same function in another form. The conversion keeps the embeddings at inference:

- Another eps of a batch norm goes into its variance and weight.
- A bias before a batch norm, for which the backbone has no parameter, goes into the norm's mean.
- Pixels scaled by 1/128 instead of 1/127.5 go into the first layer's weight.
- A batch norm that the file has merged into the convolution before it becomes an identity norm, whose
  statistics `calibrate_norms` measures.
"""

# B images   C channels   N values of a channel in a batch

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from facetrain.backbone.base import Backbone, evaluation_mode
from facetrain.errors import ModelError
from facetrain.models.backbone_layers import backbone_layers
from facetrain.models.layer_graph import IMAGE, Layer, LayerGraph

_SET_NETWORK = "set model.backbone, model.embedding_size and data.image_size as in the file"
_JOIN_PRELUS = (
    "its PReLUs are several operators each, as `export --split-prelu` writes them: export it without"
)
_UNIT_LENGTH_OPERATORS = {"ReduceL2", "Clip", "Expand", "Div", "LpNormalization", "L2Normalization"}
"""Operators that may follow the embedding: the head uses its direction only."""


@dataclass(frozen=True)
class MatchedWeights:
    """The weights of a file, under the names of a backbone."""

    weights: dict[str, Tensor]
    """The complete state dict of the backbone."""
    merged_norms: list[str]
    """Names of the batch norms that the file has merged into the layers before them."""


def match_weights(file: LayerGraph, backbone: Backbone) -> MatchedWeights:
    """Pair the layers of a file with the layers of a backbone, from the image on, and convert the weights.

    Raises:
        ModelError: the file has another network; the message names the first layers that differ.
    """
    target = backbone_layers(backbone)
    pairs = _pair_layers(target, file)
    weights: dict[str, Tensor] = {}
    merged = [name for name in pairs if _is_merged(target.layers[name], file.layers[pairs[name]])]
    # The bias of these layers is moved into the norm that follows.
    before_merged_norm = {target.layers[name].sources[0] for name in merged}
    for name, file_name in pairs.items():
        layer, file_layer = target.layers[name], file.layers[file_name]
        if layer.kind == "add":
            continue
        if name in merged:
            state = _identity_norm(layer, file_layer)
        elif layer.kind == "norm":
            previous = layer.sources[0]
            has_bias = "bias" in target.layers[previous].weights
            bias_C = None if has_bias else file.layers[pairs[previous]].weights.get("bias")
            state = _convert_norm(layer, file_layer, bias_C)
        else:
            state = _convert_weights(layer, file_layer, file.input_scale if IMAGE in layer.sources else 1.0)
            if name in before_merged_norm and "bias" in state:
                state["bias"] = torch.zeros_like(state["bias"])
        weights |= {f"{name}.{key}": value for key, value in state.items()}
    return MatchedWeights(weights, merged)


def _pair_layers(target: LayerGraph, file: LayerGraph) -> dict[str, str]:
    """Return the file's layer for each layer of the backbone, breadth first from the image.

    The consumers of a value are distinguished by their kind: in these networks no value has two consumers
    of the same kind.
    """
    target_consumers, file_consumers = target.consumers(), file.consumers()
    # Both graphs are walked from the image on: names differ between programs, the order of layers does not.
    pairs, queue = {IMAGE: IMAGE}, [IMAGE]
    for name in queue:  # grows during the loop
        if name == target.output:
            continue
        file_name, consumers = pairs[name], target_consumers[name]
        by_kind = {file.layers[n].kind: n for n in file_consumers[file_name]}
        if [target.layers[n].kind for n in consumers] == ["norm"] and "norm" not in by_kind and name != IMAGE:
            # The file has merged this norm into the layer before it: pair the norm with that layer.
            by_kind = {"norm": file_name}
        for consumer in consumers:
            layer = target.layers[consumer]
            found = by_kind.pop(layer.kind, None)
            # A consumer of two values (an add) is reached twice, and must pair with the same layer both times.
            if (
                found is None
                or not _compatible(layer, file.layers[found])
                or pairs.get(consumer, found) != found
            ):
                others = [file.layers[n] for n in file_consumers[file_name]]
                is_split = layer.kind == "prelu" and "Min" in [other.kind for other in others]
                raise _mismatch(
                    target,
                    file,
                    f"after {name} it needs {layer}, the file has {', '.join(map(str, others)) or 'nothing'}",
                    advice=_JOIN_PRELUS if is_split else _SET_NETWORK,
                )
            if consumer not in pairs:
                pairs[consumer] = found
                queue.append(consumer)
        if by_kind:
            extra = ", ".join(str(file.layers[n]) for n in by_kind.values())
            raise _mismatch(target, file, f"after {name} the file also has {extra}")
    paired = set(pairs.values())
    extra_layers = [
        str(layer)
        for name, layer in file.layers.items()
        if name not in paired and layer.kind not in _UNIT_LENGTH_OPERATORS
    ]
    if extra_layers:
        raise _mismatch(target, file, f"after {target.output} the file also has {extra_layers[0]}")
    del pairs[IMAGE]
    return pairs


def _mismatch(
    target: LayerGraph, file: LayerGraph, difference: str, *, advice: str = _SET_NETWORK
) -> ModelError:
    return ModelError(
        f"{file.origin}: its network is not the {target.origin} of model.backbone: {difference}; {advice}"
    )


def _compatible(layer: Layer, file_layer: Layer) -> bool:
    """Return whether the weights of a layer of the file convert to a layer of the backbone."""
    if layer.kind == "add":
        return True
    if "weight" not in file_layer.weights:
        return False
    weight, file_weight = layer.weights["weight"], file_layer.weights["weight"]
    if _is_merged(layer, file_layer):
        return len(file_weight) == len(weight)
    if layer.kind == "prelu":
        return file_weight.numel() in (1, weight.numel())
    if layer.kind == "norm":
        return [tensor.shape for tensor in file_layer.weights.values()] == [weight.shape] * 4
    return file_weight.shape == weight.shape and (layer.kind != "conv" or layer.options == file_layer.options)


def _is_merged(layer: Layer, file_layer: Layer) -> bool:
    return layer.kind == "norm" and file_layer.kind in ("conv", "linear")


def _convert_weights(layer: Layer, file_layer: Layer, input_scale: float) -> dict[str, Tensor]:
    """Return the state of a convolution, a linear layer or a PReLU whose input the file scales."""
    weight = file_layer.weights["weight"].float() * input_scale
    if layer.kind == "prelu":
        # The file may share one slope among all channels.
        weight = weight.flatten().expand(len(layer.weights["weight"])).clone()
    state = {"weight": weight}
    if "bias" in layer.weights:
        state["bias"] = file_layer.weights.get("bias", torch.zeros(len(weight))).float()
    return state


def _convert_norm(layer: Layer, file_layer: Layer, bias_C: Tensor | None) -> dict[str, Tensor]:
    """Return the state of a batch norm; `bias_C` is a bias before it that the backbone has no parameter for."""
    weight_C, mean_C, variance_C = (
        file_layer.weights[name].double() for name in ("weight", "mean", "variance")
    )
    if bias_C is not None:
        mean_C = mean_C - bias_C.double()
    # Keep weight / sqrt(variance + eps) under our eps. A variance below the difference of both eps is clamped
    # to 0, and the weight makes up for it.
    file_sum_C = variance_C + file_layer.options["eps"]
    variance_C = (file_sum_C - layer.options["eps"]).clamp(min=0)
    weight_C = weight_C * ((variance_C + layer.options["eps"]) / file_sum_C).sqrt()
    return _norm_state(weight_C, file_layer.weights["bias"], mean_C, variance_C)


def _identity_norm(layer: Layer, file_layer: Layer) -> dict[str, Tensor]:
    """Return the state of a batch norm that adds the bias of the file's layer and changes nothing else."""
    one_C = torch.ones(len(layer.weights["weight"]))
    bias_C = file_layer.weights.get("bias", torch.zeros_like(one_C))
    return _norm_state((one_C + layer.options["eps"]).sqrt(), bias_C, torch.zeros_like(one_C), one_C)


def _norm_state(weight_C: Tensor, bias_C: Tensor, mean_C: Tensor, variance_C: Tensor) -> dict[str, Tensor]:
    tensors = {"weight": weight_C, "bias": bias_C, "running_mean": mean_C, "running_var": variance_C}
    return {name: tensor.float() for name, tensor in tensors.items()} | {
        "num_batches_tracked": torch.tensor(0)
    }


def calibrate_norms(backbone: Backbone, names: Iterable[str], image_BCHW: Tensor) -> None:
    """Give identity norms the statistics of their input on a batch, and weights that cancel the normalization.

    The embeddings at inference do not change. Training, which normalizes with the statistics of each batch,
    then starts from about the same embeddings; with other statistics it would start from different ones.

    Args:
        backbone: The network; its mode is restored.
        names: Norms with the state of `_identity_norm`.
        image_BCHW: Normalized training images.
    """

    def calibrate(module: nn.Module, inputs: tuple[Tensor]) -> None:
        assert isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)
        x_CN = inputs[0].double().transpose(0, 1).flatten(1)
        mean_C, variance_C = x_CN.mean(1), x_CN.var(1, correction=0)
        module.bias.copy_(module.bias + mean_C)
        module.weight.copy_((variance_C + module.eps).sqrt())
        assert module.running_mean is not None and module.running_var is not None
        module.running_mean.copy_(mean_C)
        module.running_var.copy_(variance_C)

    # Hooks before the forward call: each norm is calibrated before its output reaches the next one.
    hooks = [backbone.get_submodule(name).register_forward_pre_hook(calibrate) for name in names]
    try:
        with evaluation_mode(backbone), torch.no_grad():
            backbone(image_BCHW)
    finally:
        for hook in hooks:
            hook.remove()

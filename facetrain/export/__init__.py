"""Models that leave the house: safetensors, ONNX, torch.export."""

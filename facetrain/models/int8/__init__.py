"""Quantization of convolutional networks to 8 bits, for onnxruntime."""

"""Batch normalization, PReLU and residual addition as Triton kernels that read each activation once.

An IResNet at 112 × 112 is bound by memory: on a GPU, batch norm, PReLU and the residual addition move more bytes than
the convolutions. These kernels fuse them. All tensors are activations in channels_last layout, seen as rows (N, C) with
N = batch · height · width. Sums are float32, whatever the dtype of the activations, and are formed in a fixed order
without atomic operations: the results of two runs are equal bit for bit.

The forward pass of batch norm with batch statistics, with PReLU slope a (Ioffe and Szegedy, arXiv 1502.03167; He et
al., arXiv 1502.01852):

    x̂ = (x − mean) / sqrt(var + eps)      u = w·x̂ + b      y = max(u, 0) + a·min(u, 0)

With g the gradient of y, h = g where u > 0 and a·g elsewhere, and M the mean over N (over all ranks for SyncBN):

    ∂w = Σ h·x̂      ∂b = Σ h      ∂a = Σ g·min(u, 0)      ∂x = w / sqrt(var + eps) · (h − M[h] − x̂·M[h·x̂])
"""

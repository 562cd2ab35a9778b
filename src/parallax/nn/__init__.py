"""Layers whose parameters are tables: useful on one device, sharded by `parallelize`."""

from parallax.nn.sampled_softmax import SampledSoftmaxLoss

__all__ = ["SampledSoftmaxLoss"]

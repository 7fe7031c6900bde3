"""Base classes of recurrent mixers that convolve their inputs over a few tokens before the scan."""

from __future__ import annotations

from pydantic import PositiveInt

from moesim.simulator.model.attention.recurrent import RecurrentMixer


class ConvolvedMixer(RecurrentMixer):
    """A mixer with a short causal convolution; a subclass defines the channels in `convolved`."""

    conv: PositiveInt = 4
    """Tokens that the short convolution reads."""

    @property
    def convolution_width(self) -> int:
        """`conv`."""
        return self.conv


class StateSpaceMixer(ConvolvedMixer):
    """What Mamba and Mamba-2 share: biases of the convolution and of the projections."""

    conv_bias: bool = True
    proj_bias: bool = False
    """Biases of the input and the output projection."""

    @property
    def convolution_bias(self) -> bool:
        """`conv_bias`."""
        return self.conv_bias

    @property
    def output_bias(self) -> bool:
        """`proj_bias`."""
        return self.proj_bias

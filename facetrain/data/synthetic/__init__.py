"""People who do not exist: procedural faces, for trying everything without a dataset.

An identity is a vector of shapes and colors (`identity`); an image of it adds pose, light,
expression and what stands in the way (`conditions`); `draw` puts both on pixels, `write` makes
datasets of them, and `demand` has the same images before they are written.
"""

from facetrain.data.synthetic.write import Drawn, write_dataset

__all__ = ["Drawn", "write_dataset"]

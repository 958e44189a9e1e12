"""Registry of the margins: name in the config, and place of the function or class that builds the margin.

The places are text, so that the settings have the names without importing torch.
"""

MARGINS = {
    "arcface": "facetrain.head.margins.combined:arcface",
    "cosface": "facetrain.head.margins.combined:cosface",
    "combined": "facetrain.head.margins.combined:combined",
    "softmax": "facetrain.head.margins.base:Margin",
    "adaface": "facetrain.head.margins.adaface:AdaFace",
    "magface": "facetrain.head.margins.magface:MagFace",
    "curricularface": "facetrain.head.margins.curricularface:CurricularFace",
    "elastic_arcface": "facetrain.head.margins.elasticface:elastic_arcface",
    "elastic_cosface": "facetrain.head.margins.elasticface:elastic_cosface",
}
"""What a place names is called with the settings of the margin and a seed, for margins that draw random numbers."""

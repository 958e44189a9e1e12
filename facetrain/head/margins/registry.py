"""Registry of the margins: name in the config, and place of a function of the target cosines or a class.

The places are text, so that the settings have the names without importing torch.
"""

MARGINS = {
    "arcface": "facetrain.head.margins.combined:arcface",
    "cosface": "facetrain.head.margins.combined:cosface",
    "combined": "facetrain.head.margins.combined:combined",
    "softmax": "facetrain.head.margins.combined:softmax",
    "adaface": "facetrain.head.margins.adaface:AdaFace",
    "magface": "facetrain.head.margins.magface:MagFace",
    "curricularface": "facetrain.head.margins.curricularface:CurricularFace",
    "elastic_arcface": "facetrain.head.margins.elasticface:ElasticArcFace",
    "elastic_cosface": "facetrain.head.margins.elasticface:ElasticCosFace",
}
"""The keyword arguments of a function or class are the numbers of `head.margin` that its formula has."""

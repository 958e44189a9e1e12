"""The margins by name."""

from __future__ import annotations

from collections.abc import Callable

from facetrain.errors import ConfigError
from facetrain.head.adaptive import AdaFace, CurricularFace, ElasticFace, MagFace
from facetrain.head.combined import Margin

__all__ = ["Margin", "build_margin"]


def build_margin(
    type: str,
    *,
    scale: float = 64.0,
    m1: float = 1.0,
    m2: float | None = None,
    m3: float | None = None,
    gradient: str = "exact",
    beyond_pi: str = "none",
    filter_threshold: float = 0.0,
    h: float = 0.333,
    average: float = 0.01,
    sigma: float = 0.0125,
    norms: tuple[float, float] = (10.0, 110.0),
    margins: tuple[float, float] = (0.45, 0.8),
    norm_weight: float = 35.0,
    seed: int = 0,
) -> Margin:
    """Build the margin of a name; a name takes only the numbers that are its own.

    Where m2 or m3 is None, it is what the margin was published with.

    Raises:
        ConfigError: there is no margin of that name.
    """

    def or_(value: float | None, published: float) -> float:
        return published if value is None else value

    def combined(m1: float, m2: float, m3: float) -> Margin:
        return Margin(
            scale,
            m1,
            m2,
            m3,
            linear_beyond_pi=beyond_pi == "linear",
            straight_through=gradient == "straight_through",
            filter_threshold=filter_threshold,
        )

    own: dict[str, Callable[[], Margin]] = {
        "arcface": lambda: combined(1.0, or_(m2, 0.5), 0.0),
        "cosface": lambda: combined(1.0, 0.0, or_(m3, 0.4)),
        "combined": lambda: combined(m1, or_(m2, 0.5), or_(m3, 0.0)),
        "softmax": lambda: combined(1.0, 0.0, 0.0),
        "adaface": lambda: AdaFace(
            scale, m2=or_(m2, 0.4), h=h, average=average, filter_threshold=filter_threshold
        ),
        "magface": lambda: MagFace(
            scale, norms=norms, margins=margins, norm_weight=norm_weight, filter_threshold=filter_threshold
        ),
        "curricularface": lambda: CurricularFace(
            scale, m2=or_(m2, 0.5), average=average, linear_beyond_pi=True
        ),
        "elastic_arcface": lambda: ElasticFace(
            scale, m2=or_(m2, 0.5), sigma=sigma, seed=seed, filter_threshold=filter_threshold
        ),
        "elastic_cosface": lambda: ElasticFace(
            scale, m3=or_(m3, 0.35), sigma=sigma, seed=seed, filter_threshold=filter_threshold
        ),
    }
    if type not in own:
        raise ConfigError(f"head.margin.type: {type!r} does not exist; there are {', '.join(own)}")
    return own[type]()

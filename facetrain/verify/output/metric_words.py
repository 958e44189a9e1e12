"""Names of metrics in the words of the field, for pages that people read."""

from __future__ import annotations

_WORDS = {
    "accuracy": "accuracy",
    "accuracy_std": "standard deviation of the folds' accuracies",
    "accuracy_no_flip": "accuracy without mirror images",
    "accuracy_mean": "mean accuracy of the groups",
    "accuracy_spread": "standard deviation of the groups' accuracies",
    "auc": "area under the ROC (AUC)",
    "eer": "equal error rate (EER)",
    "xnorm": "mean length of the embeddings",
    "skewed_error_ratio": "highest by lowest error (SER)",
    "fmr": "false match rate (FMR)",
    "fnmr": "false non-match rate (FNMR)",
    "fmr_worst_to_mean": "highest FMR by the mean of the groups",
    "fnmr_worst_to_mean": "highest FNMR by the mean of the groups",
    "fmr_worst_to_best": "highest by lowest FMR",
    "fnmr_worst_to_best": "highest by lowest FNMR",
    "fmr_gini": "Gini coefficient of the FMRs",
    "fnmr_gini": "Gini coefficient of the FNMRs",
}
_RATES_AT = {"tar": "FAR", "fnmr": "FMR", "tpir": "FPIR", "fnir": "FPIR"}
"""Rate -> rate that defines its threshold."""


def metric_words(name: str) -> str:
    """Return a metric in words: `tar@1e-04` is "TAR at FAR 0.0001", `rank5` the "rank-5 identification rate"."""
    if name in _WORDS:
        return _WORDS[name]
    rate, _, limit = name.partition("@")
    if limit and rate in _RATES_AT:
        return f"{rate.upper()} at {_RATES_AT[rate]} {float(limit):.9f}".rstrip("0")
    if name.startswith("rank") and name[4:].isdigit():
        return f"rank-{name[4:]} identification rate"
    return name.replace("_", " ")

import torch

from facetrain.bench.machine_peak import measure_peak


def test_a_machine_that_is_too_busy_for_a_second_product_has_rates_all_the_same():
    peak = measure_peak("fp32", torch.device("cpu"), seconds=0)
    assert 0 < peak.flops < float("inf") and 0 < peak.bytes < float("inf")

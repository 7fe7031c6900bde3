"""Scripts that each measure a single question on GPUs; shipped profiles and data use their results.

The results are in `benchmarks/gpu/results`, to which the sources of the shipped data refer.
"""

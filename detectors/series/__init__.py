"""Models of several series at once, of their seasons and of trends that end in a failure.

Isolation forests and a forecasting net lost to the residual model on every test set and are only peers in the benchmark; fits of
statsmodels live in `seasonal_band` alone, on a budget (docs/benchmark-detectors.md, "What became of the methods").
"""
